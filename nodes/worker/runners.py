"""Which runner computes a model. Called by the actor, in the thread that will run the steps."""

from collections.abc import Callable

from kvstore.page_pool import PagePool
from nodes.model_spec import ModelSpec
from nodes.worker.config import WorkerConfig
from nodes.worker.echo import EchoRunner
from nodes.worker.step import Runner

RunnerFactory = Callable[[ModelSpec, WorkerConfig, PagePool], Runner]


def make_runner(spec: ModelSpec, config: WorkerConfig, pool: PagePool) -> Runner:
    """A runner of `spec` over `pool`, weights loaded. Raises `WorkerError`."""
    if spec.source == "echo":
        return EchoRunner(pool.pages_view, pool.layout, spec.eos_token_ids[0], spec.echo)
    if config.device != "cpu":
        from nodes.worker.cuda.load import load_cuda_runner

        return load_cuda_runner(spec, config, pool)
    # Importing torch takes a second and 200 MB, which the echo model and the simulations do without.
    from nodes.worker.runner import load_torch_runner

    return load_torch_runner(spec, config, pool)
