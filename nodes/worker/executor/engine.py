"""A worker's runner and the threads that it computes in: loaded, released, taken back.

Models compute in a thread of their own, so that heartbeats go on during the longest step; the echo model computes on
the event loop. Part of the worker's actor, which decides when.
"""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvstore.pool.page_pool import PagePool
from mesh.actor import Context
from mesh.calls.persistent_ask import PersistentAsk
from nodes.model_spec import ModelSpec
from nodes.protocol import JoinGroup
from nodes.protocol.memory import KEEP, RELOAD
from nodes.worker.config import WorkerConfig
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.executor.runners import RunnerFactory
from nodes.worker.executor.steps_ahead import StepsAhead
from nodes.worker.memory.actions import give_back_heap
from nodes.worker.parallel.group import RankGroup
from nodes.worker.steps.step import PipelinedRunner, RemappableRunner, RunnableStep, Runner, StepOutcome
from nodes.worker.weights.load_progress import LoadProgress, current_load

_Result = TypeVar("_Result")


class Engine:
    """See the module. `ranks`: the group of ranks that this worker belongs to, if any."""

    def __init__(self, config: WorkerConfig, make: RunnerFactory, ranks: RankGroup | None) -> None:
        self._config = config
        self._make = make
        self._ranks = ranks
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: StepsAhead | None = None
        self.runner: Runner | None = None
        self.progress: LoadProgress | None = None
        """Progress of the running load."""
        self.kernels_note = ""
        """Why slower kernels are in use than there could be, as of the last load."""

    @property
    def is_threaded(self) -> bool:
        """Whether steps run in a thread, by `run`."""
        return self._thread is not None

    @property
    def runs_ahead(self) -> bool:
        """Whether several steps may be in flight."""
        return self._ahead is not None

    async def load(self, ctx: Context, asks: PersistentAsk, spec: ModelSpec, pool: PagePool) -> Runner:
        """Meet the other ranks and load the model over `pool`. Raises WorkerError, ModelError, CallError."""
        config = self._config
        own = JoinGroup(
            group=config.group,
            rank=config.tp_rank,
            size=config.tp_size,
            model=spec.fingerprint,
            incarnation=pool.info.incarnation,
        )
        if spec.source == "echo":
            if self._ranks is not None:
                await self._ranks.form(ctx, asks, own, None)
            self.runner = self._make(spec, config, pool)
            return self.runner
        # One thread for loading and running: torch keeps its number of threads per calling thread.
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="runner")
        if self._ranks is not None:
            await self._ranks.form(ctx, asks, own, self._thread)
        self.progress = LoadProgress()
        self.runner = await self._in_thread(partial(self._make_in_thread, spec, pool))
        self.kernels_note, self.progress = self.progress.kernels_note, None
        self._begin_ahead(self.runner)
        return self.runner

    async def run(self, step: RunnableStep) -> StepOutcome:
        """Run a step in the thread. Raises the error of a failed device."""
        if self._ahead is not None:
            return await self._ahead.run(step)
        return await self._in_thread(partial(run_isolated, self.require(), step))

    def require(self) -> Runner:
        assert self.runner is not None, "a step before the model was loaded"
        return self.runner

    async def release(self, weights: str) -> None:
        """Forget the pool, and do with the weights as `weights` says (`keep`, `backup`, `reload`). No step may run."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        runner, self.runner = self.runner, None
        # With `reload` the whole runner is dropped: unmapping it first would only preserve what is thrown away.
        if isinstance(runner, RemappableRunner) and weights != RELOAD:
            self.runner = runner
            await self._in_thread(partial(runner.unmap, backs_up=weights != KEEP))
        del runner
        await self._in_thread(give_back_heap)

    async def take(self, ctx: Context, asks: PersistentAsk, spec: ModelSpec, pool: PagePool) -> None:
        """Compute over `pool`, with the weights that were kept or are loaded again."""
        runner = self.runner
        if isinstance(runner, RemappableRunner):
            await self._in_thread(partial(runner.remap, pool))
            self._begin_ahead(runner)
        else:
            await self.load(ctx, asks, spec, pool)

    async def stop(self, ctx: Context, *, is_on_device: bool) -> None:
        """Give the threads back; on a device, wait for what runs there, because its memory is unmapped next."""
        if self._ahead is not None:
            self._ahead.stop()
        if self._thread is not None:
            # Queued behind the thread's current work, and ahead of anything else.
            last = self._thread.submit(self._synchronize, ctx) if is_on_device else None
            self._thread.shutdown(wait=False, cancel_futures=last is None)
            if last is not None:
                await asyncio.wrap_future(last)
        self.runner = None

    def _make_in_thread(self, spec: ModelSpec, pool: PagePool) -> Runner:
        current_load.set(self.progress)
        if self._ranks is None:
            return self._make(spec, self._config, pool)
        return self._make(spec, self._config, pool, self._ranks.connect())

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _begin_ahead(self, runner: Runner) -> None:
        if isinstance(runner, PipelinedRunner):
            assert self._thread is not None, "a device's runner needs a thread"
            self._ahead = StepsAhead(runner, self._thread)
        # A full collection walks everything that torch has imported, a tenth of a second between two tokens.
        gc.collect()
        gc.freeze()

    def _synchronize(self, ctx: Context) -> None:
        if isinstance(self.runner, PipelinedRunner):
            try:
                self.runner.synchronize()
            except Exception as error:  # noqa: BLE001 # a device that failed computes nothing more either
                ctx.log.warning("device failed at the end", why=f"{type(error).__name__}: {error}")
