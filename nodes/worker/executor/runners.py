"""Chooses the runner that computes a model. Called by the actor, in the thread that will run the steps."""

from typing import Protocol

from kvstore.pool.device import CPU
from kvstore.pool.page_pool import PagePool
from nodes.model_spec import ModelSpec
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import CollectiveFailed, GroupNotFormed
from nodes.worker.executor.echo import EchoRunner
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.steps.step import Runner


class RunnerFactory(Protocol):
    """Makes a runner: `make_runner`, or a test's own. Blocks while weights load."""

    def __call__(
        self, spec: ModelSpec, config: WorkerConfig, pool: PagePool, collectives: Collectives | None = None, /
    ) -> Runner:
        """A runner of `spec` over `pool`."""
        ...


def make_runner(
    spec: ModelSpec, config: WorkerConfig, pool: PagePool, collectives: Collectives | None = None
) -> Runner:
    """A runner of `spec` over `pool`, weights loaded; with `collectives`, of this rank's part.

    Raises `WorkerError` or `ModelError`; the group is then over for all its ranks.
    """
    if spec.source == "echo":
        return EchoRunner(pool.pages_view, pool.layout, spec.eos_token_ids[0], spec.echo)
    if collectives is not None:
        return _make_rank(spec, config, pool, collectives)
    if config.device != CPU:
        from nodes.worker.cuda.load import load_cuda_runner

        return load_cuda_runner(spec, config, pool)
    # Importing torch takes a second and 200 MB, which the echo model and the simulations save.
    from nodes.worker.executor.runner import load_torch_runner

    return load_torch_runner(spec, config, pool)


def _make_rank(spec: ModelSpec, config: WorkerConfig, pool: PagePool, collectives: Collectives) -> Runner:
    from nodes.worker.cuda.load import load_cuda_runner, load_host_runner

    load = load_host_runner if config.device == CPU else load_cuda_runner
    try:
        return load(spec, config, pool, collectives)
    except CollectiveFailed as error:
        raise GroupNotFormed(
            f"the ranks of {config.group} lost each other while they loaded {spec.name}: {error}"
        ) from error
    except Exception:
        # The others may be waiting for this one in their first operation.
        collectives.abort()
        raise
