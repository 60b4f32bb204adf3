"""Chooses the runner that computes a model. Called by the actor, in the thread that will run the steps."""

from typing import Protocol

from kvstore.pool.device import CPU
from kvstore.pool.page_pool import PagePool
from nodes.model_spec import ModelSpec
from nodes.model_spec.fingerprint import require_unchanged
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
    try:
        # Importing torch takes a second and 200 MB, which the echo model and the simulations save.
        if config.device == CPU:
            from nodes.worker.ops.torch.load import load_host_runner

            runner = load_host_runner(spec, config, pool, collectives)
        else:
            from nodes.worker.cuda.load import load_cuda_runner

            runner = load_cuda_runner(spec, config, pool, collectives)
        # Its pages go by the name of the bytes that were hashed. Nothing is left in the files.
        require_unchanged(spec)
        return runner
    except CollectiveFailed as error:
        raise GroupNotFormed(
            f"the ranks of {config.group} lost each other while they loaded {spec.name}: {error}"
        ) from error
    # Whatever it was, the others may be waiting for this rank in their first operation.
    except Exception:
        if collectives is not None:
            collectives.abort()
        raise
