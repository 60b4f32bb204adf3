"""The worker's actor: maps the pool, loads the model, runs the steps that its core lets through.

Told `StepPlan` by the scheduler, tells `StepResult` back; asked `Adopt`. Models compute in one thread of their own, so
heartbeats go on during the longest step; the echo model computes on the loop and waits its time out there, so that it
works in virtual time.
"""

import asyncio
import gc
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, assert_never

import msgspec

from kvstore.device import CPU
from kvstore.mapping import map_pool
from kvstore.page_pool import MemoryHost, PagePool
from kvstore.protocol import MapPool, PoolHandle
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.codec import Codec
from mesh.membership import Member
from mesh.persistent_ask import PersistentAsk
from mesh.transport.base import Buffer
from nodes.model_spec import ModelSpec, resolve_model
from nodes.protocol import Adopt, Adopted, Dismiss, HotNodeMessage, JoinGroup, NodeMessage, StepPlan
from nodes.roles import is_replaced
from nodes.worker.collectives import CollectivesMaker, collectives_maker
from nodes.worker.config import WorkerConfig
from nodes.worker.core import (
    AdoptArrived,
    AnswerAdopt,
    Command,
    Event,
    Limits,
    RefuseAdopt,
    RunStep,
    SendResult,
    StepArrived,
    StepDone,
    StepRefused,
    WorkerCore,
)
from nodes.worker.errors import LayoutMismatch
from nodes.worker.group import RankGroup
from nodes.worker.ranks import RankCore
from nodes.worker.runners import RunnerFactory, make_runner
from nodes.worker.step import PipelinedRunner, RunnableStep, Runner, StepOutcome, run_isolated
from nodes.worker.steps_ahead import StepsAhead

DEVICE_DEPTH: Final = 2
"""Steps on their way to a device: one computes, one waits behind it, so that the device never waits for the host."""


def kill_this_process() -> None:
    """As the supervisor would."""
    os.kill(os.getpid(), signal.SIGKILL)


class WorkerActor(Actor):
    """One worker. `host` is where pools are mapped from; what follows it is for tests to give their own."""

    role: ClassVar[str] = "worker"
    codec: ClassVar[Codec] = Codec(NodeMessage, HotNodeMessage)
    ready_after_start: ClassVar[bool] = False

    def __init__(
        self,
        config: WorkerConfig,
        host: MemoryHost,
        make: RunnerFactory = make_runner,
        kill: Callable[[], None] = kill_this_process,
        collectives: Callable[[WorkerConfig], CollectivesMaker] = collectives_maker,
    ) -> None:
        self._config = config
        self._kill = kill
        self._host = host
        self._make = make
        self._pool: PagePool | None = None
        self._runner: Runner | None = None
        self._core: WorkerCore | None = None
        self._ranks = RankGroup(config, self._leave, collectives) if config.tp_size > 1 else None
        self._adopt_timer: asyncio.TimerHandle | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: StepsAhead | None = None
        self._last_end = 0.0
        self._is_stopping = False
        self._events: deque[Event] = deque()
        self._dispatching = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._persistent = PersistentAsk(config.map_retry_s)
        self._adopted = Adopted(last_step=0, worker_epoch=0, numerics="", vocab_size=0)

    async def start(self) -> None:
        """Map the pool, meet the other ranks and load the model, then announce `ready`.

        Raises ModelError, PoolError, WorkerError, DeviceError or CallError.
        """
        config = self._config
        spec = resolve_model(config.model)
        ask = MapPool(group=config.group, rank=config.tp_rank)
        handle: PoolHandle = await self._persistent.ask(
            self.ctx, config.agent, ask, timeout_s=config.map_timeout_s, what="the pool"
        )
        wanted = spec.kv_layout(config.dtype, config.page_size, config.tp_rank, config.tp_size)
        if handle.layout != wanted:
            raise LayoutMismatch(
                f"{config.agent} has made the pool of {config.group} for {handle.layout}, and {config.model} needs"
                f" {wanted}. Give agent, scheduler and worker of a group the same model, dtype, page size and ranks."
            )
        pool = self._pool = map_pool(self._host, handle)
        runner = self._runner = await self._load(spec, pool)
        make_core = WorkerCore if self._ranks is None else RankCore
        self._core = make_core(
            Limits(pool.num_pages, config.page_size, spec.vocab_size, spec.context_length, config.max_batch_tokens),
            depth=DEVICE_DEPTH if self._ahead is not None else 1,
        )
        self._adopted = Adopted(
            last_step=0,
            worker_epoch=self.ctx.address.epoch,
            numerics=runner.numerics,
            vocab_size=spec.vocab_size,
            max_batch_tokens=config.max_batch_tokens,
            group_epoch=self._ranks.epoch if self._ranks is not None else 0,
        )
        self.ctx.announce(
            "ready",
            group=config.group,
            model=spec.name,
            vocab_size=spec.vocab_size,
            numerics=runner.numerics,
            max_batch_tokens=config.max_batch_tokens,
        )

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        """Take in a step; see `Actor.on_tell`."""
        if isinstance(message, StepPlan):
            self._dispatch(StepArrived(sender.actor_id, message, buffers))
        elif isinstance(message, Dismiss):
            self._on_dismiss(sender, message)
        else:
            super().on_tell(sender, message, buffers)

    def on_ask(self, call: Call) -> None:
        """Take in a scheduler, or another rank; see `Actor.on_ask`."""
        if isinstance(call.message, JoinGroup) and self._ranks is not None:
            self._ranks.on_ask(call)
        elif not isinstance(call.message, Adopt):
            super().on_ask(call)
        elif self._core is None:
            call.fail("not_ready", "the model is still being loaded", retryable=True)
        else:
            self._dispatch(AdoptArrived(call.message, call))
            self._watch_adoption()

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        """See `Actor.on_members`: a pool that was made again has to be mapped again.

        Pages on a device die with their agent, and their memory is free only when this process lets go of it too: the
        next agent needs it.
        """
        config, pool = self._config, self._pool
        if pool is not None and pool.info.device != CPU and any(one.actor_id == config.agent for one in left):
            self.ctx.end(f"{config.agent} is gone, and the pages of {config.group} on {pool.info.device} with it")
        if pool is not None and is_replaced(self.ctx.members, config.agent, config.group, pool.info.incarnation):
            self.ctx.end(f"{config.agent} has made the pool of {config.group} again")
        if self._ranks is not None:
            self._ranks.on_members(self.ctx, left)
        self._persistent.members_changed()

    async def drain(self) -> None:
        """Begin no more steps; return when the running one is done. The others are sent to whoever follows."""
        if self._core is not None:
            self._core.is_draining = True
            if not self._core.is_running:
                return
            self._idle.clear()
            await self._idle.wait()

    async def stop(self) -> None:
        """Give back thread and pool.

        In host memory a step in its thread finishes on what its tensors keep mapped. A device's memory is unmapped at
        once, so its steps are waited for; who waits too long is ended by `mesh.run`.
        """
        self._is_stopping = True
        if self._core is not None:
            self._core.is_draining = True
        if self._ranks is not None:
            self._ranks.abort()
        if self._ahead is not None:
            self._ahead.stop()
        if self._thread is not None:
            is_on_device = self._pool is not None and self._pool.info.device != CPU
            # Behind what the thread does now, and before anything else gets in.
            last = self._thread.submit(self._synchronize) if is_on_device else None
            self._thread.shutdown(wait=False, cancel_futures=last is None)
            if last is not None:
                await asyncio.wrap_future(last)
        self._runner = None
        if self._pool is not None:
            self._pool.close()

    def stats(self) -> dict[str, float]:
        """See `Actor.stats`."""
        return {"mesh_worker_queued_steps": float(self._core.num_queued) if self._core else 0.0}

    async def _load(self, spec: ModelSpec, pool: PagePool) -> Runner:
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
                await self._ranks.form(self.ctx, self._persistent, own, None)
            return self._make(spec, config, pool)
        # One thread for loading and running: torch keeps its number of threads per calling thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        if self._ranks is not None:
            await self._ranks.form(self.ctx, self._persistent, own, self._thread)
        loop = asyncio.get_running_loop()
        runner = await loop.run_in_executor(self._thread, self._make_in_thread, spec, pool)
        if isinstance(runner, PipelinedRunner):
            self._ahead = StepsAhead(runner, self._thread)
        # A full collection walks everything that torch has imported: a tenth of a second between two tokens.
        gc.collect()
        gc.freeze()
        return runner

    def _make_in_thread(self, spec: ModelSpec, pool: PagePool) -> Runner:
        if self._ranks is None:
            return self._make(spec, self._config, pool)
        return self._make(spec, self._config, pool, self._ranks.connect())

    def _leave(self, reason: str) -> None:
        """The group of ranks is over. Who is to end anyhow ends in its own way, unless it hangs."""
        if self._is_stopping or (self._core is not None and self._core.is_draining):
            return
        if self._thread is None:
            self.ctx.end(reason)
        else:
            self._die(reason)

    def _watch_adoption(self) -> None:
        """While a scheduler waits for steps of the one before: they end soon, or never."""
        is_waiting = isinstance(self._core, RankCore) and self._core.num_deferred > 0
        if is_waiting and self._adopt_timer is None:
            grace_s = self._config.adopt_grace_s
            reason = f"a step has not ended {grace_s:g} s after another scheduler came: not all ranks have it"
            self._adopt_timer = self.ctx.later(grace_s, self._leave, reason)
        elif not is_waiting and self._adopt_timer is not None:
            self._adopt_timer.cancel()
            self._adopt_timer = None

    def _synchronize(self) -> None:
        if isinstance(self._runner, PipelinedRunner):
            try:
                self._runner.synchronize()
            except Exception as error:  # noqa: BLE001 # a device that failed computes nothing more either
                self.ctx.log.warning("device failed at the end", why=f"{type(error).__name__}: {error}")

    def _on_dismiss(self, sender: Address, message: Dismiss) -> None:
        """End, so that the supervisor starts another; unless it is another scheduler's or another worker's business."""
        ours = (self._core.scheduler_epoch if self._core is not None else 0, self.ctx.address.epoch)
        if (message.scheduler_epoch, message.worker_epoch) == ours:
            self.ctx.end(f"{sender} cannot believe what it answers: {message.reason}")

    def _dispatch(self, event: Event) -> None:
        """Feed the core; events that performing a command brings about queue up rather than recurse."""
        if self._core is None:
            self.ctx.metrics.count("mesh_worker_steps_refused_total", reason="not_ready")
            return
        self._events.append(event)
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self._events:
                for command in self._core.handle(self._events.popleft()):
                    self._perform(command)
        finally:
            self._dispatching = False
        if not self._core.is_running:
            self._idle.set()

    def _perform(self, command: Command) -> None:
        match command:
            case RunStep(runnable):
                self._run(runnable)
            case SendResult(actor_id, result):
                self.ctx.tell(actor_id, result)
            case AnswerAdopt(call, last_step):
                call.reply(msgspec.structs.replace(self._adopted, last_step=last_step))
            case RefuseAdopt(call, code, message):
                call.fail(code, message)
            case StepRefused(step, reason):
                self.ctx.metrics.count("mesh_worker_steps_refused_total", reason=reason)
                self.ctx.log.debug("step refused", step=step, reason=reason)
            case _:
                assert_never(command)

    def _run(self, step: RunnableStep) -> None:
        if self._thread is not None:
            self.ctx.spawn(self._run_in_thread(step, self._thread), name="step")
            return
        started = self.ctx.now()
        outcome = run_isolated(self._require_runner(), step)
        if outcome.delay_s > 0:
            self.ctx.later(outcome.delay_s, self._done, step, outcome, started)
        else:
            self._done(step, outcome, started)

    async def _run_in_thread(self, step: RunnableStep, thread: ThreadPoolExecutor) -> None:
        started = self.ctx.now()
        config = self._config
        allowed_s = config.step_deadline_s + config.token_deadline_s * sum(row.num_tokens for row in step.rows)
        deadline = self.ctx.later(allowed_s, self._die, f"step {step.step} has not ended within {allowed_s:g} s")
        try:
            if self._ahead is not None:
                outcome = await self._ahead.run(step)
            else:
                loop = asyncio.get_running_loop()
                outcome = await loop.run_in_executor(thread, run_isolated, self._require_runner(), step)
        except Exception as error:  # noqa: BLE001 - what a row is to blame for is in the outcome
            if self._is_stopping:
                return
            self._die(f"the device failed in step {step.step}: {type(error).__name__}: {error}")
            return
        finally:
            deadline.cancel()
        self._done(step, outcome, started)

    def _die(self, reason: str) -> None:
        """Leave the steps to the next incarnation. A thread that hangs would hold up every gentler end."""
        self.ctx.log.error("dying", why=reason)
        sys.stdout.flush()
        sys.stderr.flush()
        self._kill()

    def _done(self, step: RunnableStep, outcome: StepOutcome, started: float) -> None:
        now = self.ctx.now()
        # A step that was launched ahead has waited for the one before.
        elapsed_s, self._last_end = now - max(started, self._last_end), now
        self.ctx.metrics.observe("mesh_worker_step_seconds", elapsed_s)
        self.ctx.metrics.count("mesh_worker_tokens_total", sum(row.num_tokens for row in step.rows))
        for error in outcome.errors:
            self.ctx.metrics.count("mesh_worker_row_errors_total", code=error.code)
            self.ctx.log.warning("row failed", step=step.step, row=error.row, code=error.code, why=error.message)
        self._dispatch(StepDone(outcome, elapsed_s))
        self._watch_adoption()

    def _require_runner(self) -> Runner:
        assert self._runner is not None, "a step before the model"
        return self._runner
