"""The worker's actor: maps the pool, loads the model, runs the steps that its core lets through.

The scheduler asks `Adopt` and tells `StepPlan`; the worker tells `StepResult` back. Models compute in a thread of their
own, so heartbeats go on during the longest step; the echo model computes on the event loop and waits out its delays
there, so that it works in virtual time.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import msgspec
from typing_extensions import override

from kvstore.pool.device import CPU
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import PoolHandle
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import CallError
from mesh.membership.view import RELEASED, Member
from mesh.runtime.driver import CoreDriver, perform
from mesh.transport.base import Buffer
from mesh.wire.codec import Codec
from nodes.asks import DrawnModel, possible
from nodes.model_spec import ModelSpec
from nodes.protocol import (
    Adopt,
    Adopted,
    Fence,
    JoinGroup,
    LetGo,
    StepMismatch,
    StepPlan,
    StepResult,
    StepResults,
    TakeUp,
)
from nodes.protocol.memory import MEMORY_RELEASED, HasLetGo
from nodes.protocol.steps import ROW_ERRORS
from nodes.redaction import PromptRedactor
from nodes.request import VECTORS
from nodes.roles import NODE_CODEC, is_replaced
from nodes.worker.config import WorkerConfig
from nodes.worker.core import (
    STEP_REFUSALS,
    AdoptArrived,
    Command,
    Event,
    RunStep,
    SendResult,
    StepArrived,
    StepDone,
    StepRefused,
    TellMismatch,
    WorkerCore,
)
from nodes.worker.errors import DeviceFailed
from nodes.worker.executor.engine import Engine
from nodes.worker.executor.isolation import run_isolated, traceback_of
from nodes.worker.executor.runners import RunnerFactory, make_runner
from nodes.worker.executor.step_watch import StepWatch
from nodes.worker.memory.actions import MemoryActions, Resident
from nodes.worker.parallel.collectives import CollectivesMaker
from nodes.worker.parallel.group import RankGroup, collectives_maker
from nodes.worker.parallel.ranks import RankCore
from nodes.worker.pool.taking import take_pool, wait_for_pool
from nodes.worker.steps.columns import Limits
from nodes.worker.steps.notes import note_begin, note_end
from nodes.worker.steps.step import RunnableStep, StepOutcome

RESULTS_WAIT_S: Final = 0.001
"""How long a result waits for the next ones of its plan. A message is three wakes, 0.1 ms of CPU in all; a reader of
streams does not see a millisecond."""
DEVICE_DEPTH: Final = 2
"""Steps in flight on a device: one computes, one waits behind it, so that the device never waits for the host."""


def kill_this_process() -> None:
    """Kill this process as the supervisor would."""
    os.kill(os.getpid(), signal.SIGKILL)


class WorkerActor(Actor, Resident):
    """One worker. `host` is where pools are mapped from, `age` how many seconds old its process is.

    Tests replace the arguments in between.
    """

    role: ClassVar[str] = "worker"
    codec: ClassVar[Codec] = NODE_CODEC
    ready_after_start: ClassVar[bool] = False

    def __init__(
        self,
        config: WorkerConfig,
        host: MemoryHost,
        make: RunnerFactory = make_runner,
        kill: Callable[[], None] = kill_this_process,
        collectives: Callable[[WorkerConfig], CollectivesMaker] = collectives_maker,
        age: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._config = config
        self._kill = kill
        self._age = age
        self._host = host
        self._pool: PagePool | None = None
        self._spec: ModelSpec
        self._core: WorkerCore | None = None
        self._driver: CoreDriver[Event, Command] | None = None
        self._ranks = RankGroup(config, self._leave, collectives) if config.tp_size > 1 else None
        self._adopt_timer: asyncio.TimerHandle | None = None
        self._engine = Engine(config, make, self._ranks)
        self._watch = StepWatch(lambda delay_s, callback: self.ctx.later(delay_s, callback), self._on_hang)
        self._last_end = 0.0
        # Results of a plan of several steps that wait for the next one, and whom they are for.
        self._results: list[StepResult] = []
        self._scheduler = ""
        self._results_timer: asyncio.TimerHandle | None = None
        self._last_failure = ""
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._persistent = PersistentAsk(config.map_retry_s)
        self._memory = MemoryActions(self)

    async def start(self) -> None:
        """Map the pool, meet the other ranks and load the model, then announce `ready`.

        Raises ModelError, PoolError, WorkerError, DeviceError or CallError.
        """
        age_s = self._age()
        begin = self.ctx.metrics.begin
        begin("mesh_worker_steps_failed_total", "mesh_worker_tokens_total")
        begin("mesh_worker_steps_refused_total", reason=STEP_REFUSALS)
        begin("mesh_worker_row_errors_total", code=ROW_ERRORS)
        config = self._config
        spec = self._spec = await self._read_model()
        asks = self._persistent
        pool = self._pool = await wait_for_pool(self.ctx, asks, self._host, config, spec, self._on_refusal)
        # Without the wait for the pool: while the group's memory is released it may be hours.
        began = self.ctx.now()
        # Beside the load of the weights: a vocabulary of 152,000 tokens takes 1.2 s, and a successor is waited for.
        possible_asks = asyncio.ensure_future(_possible_asks(spec))
        runner = await self._engine.load(self.ctx, asks, spec, pool)
        if note := self._engine.kernels_note:
            self.ctx.log.warning("slow_kernels", why=note)
        make_core = WorkerCore if self._ranks is None else RankCore
        limits = Limits(pool.num_pages, config.page_size, spec.vocab_size, spec.context_length, config.max_batch_tokens)
        core = self._core = make_core(limits, depth=(depth := self._depth), end_token_ids=spec.eos_token_ids, spec=spec)
        self._driver = CoreDriver(
            self,
            "worker",
            lambda event, _: core.handle(event),
            self._perform,
            setup={"limits": limits, "depth": depth, "end_token_ids": spec.eos_token_ids, "model": spec.name},
            redact=PromptRedactor,
        )
        model: dict[str, Any] = {"numerics": runner.numerics, "vocab_size": spec.vocab_size}
        model |= {"max_batch_tokens": config.max_batch_tokens}
        own = {"incarnation": pool.info.incarnation, "group_epoch": self._ranks.epoch if self._ranks else 0}
        core.adopted = Adopted(
            worker_epoch=self.ctx.address.epoch,
            asks=await possible_asks,
            start_s=age_s + self.ctx.now() - began,
            **own,
            **model,
        )
        model |= {"model": spec.name, "kernels": self._engine.kernels_note, "quantization": spec.quantization}
        saves_memory = config.memory_saver and self._releases_in_place
        self.ctx.announce("ready", group=config.group, memory_saver=saves_memory, **model)

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        """Take in a step or a fence; see `Actor.on_tell`."""
        if isinstance(message, StepPlan):
            self._dispatch(StepArrived(sender.actor_id, message, buffers, self.ctx.now()))
        elif isinstance(message, Fence):
            self._on_fence(sender, message)
        else:
            super().on_tell(sender, message, buffers)

    def on_ask(self, call: Call) -> None:
        """Let a scheduler adopt or a rank join, release memory or take it back; see `Actor.on_ask`."""
        if isinstance(call.message, JoinGroup) and self._ranks is not None:
            self._ranks.on_ask(call)
        elif isinstance(call.message, LetGo | TakeUp):
            self._on_order(call, call.message)
        elif not isinstance(call.message, Adopt):
            super().on_ask(call)
        elif not self._memory.is_held:
            call.fail(MEMORY_RELEASED, f"the memory of {self._config.group} is released", retryable=True)
        elif self._core is None:
            call.fail("not_ready", "the model is still being loaded", retryable=True)
        else:
            self._dispatch(AdoptArrived(call.message, call))
            self._watch_adoption()

    @override
    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        """End if the pool has been made again, since it must then be mapped again.

        Pages on a device die with their agent; its successor gets their memory only once this process lets go of it.
        """
        config, pool = self._config, self._pool
        if pool is not None and pool.info.device != CPU and any(one.actor_id == config.agent for one in left):
            self.ctx.end(f"{config.agent} is gone, and with it the pages of {config.group} on {pool.info.device}")
        if pool is not None and is_replaced(self.ctx.members, config.agent, config.group, pool.info.incarnation):
            self.ctx.end(f"{config.agent} has made a new pool for {config.group}")
        if self._ranks is not None:
            self._ranks.on_members(self.ctx, left)
        self._persistent.members_changed()

    async def drain(self) -> None:
        """Begin no more steps; return when the running one is done. The scheduler sends the others to the successor."""
        if self._core is not None:
            self._core.is_draining = True
            if not self._core.is_running:
                return
            self._idle.clear()
            await self._idle.wait()

    async def stop(self) -> None:
        """Give back thread and pool.

        In host memory a step still running in its thread finishes on the memory that its tensors keep mapped. A
        device's memory is unmapped at once, so its steps are waited for; `mesh.run` ends a process that waits too long.
        """
        self._is_stopping = True
        self._watch.stop()
        if self._results_timer is not None:
            self._results_timer.cancel()
        if self._core is not None:
            self._core.is_draining = True
        if self._ranks is not None:
            self._ranks.abort()
        is_on_device = self._pool is not None and self._pool.info.device != CPU
        await self._engine.stop(self.ctx, is_on_device=is_on_device)
        if self._pool is not None:
            self._pool.close()

    @override
    def stats(self) -> dict[str, float]:
        return {"mesh_worker_queued_steps": float(self._core.num_queued) if self._core else 0.0}

    def progress(self) -> str:
        """`loading 12/28 layers, 3.1 of 7.6 GB` while weights are read, otherwise empty."""
        return str(self._engine.progress or "")

    @override
    def stop_steps(self, *, is_stopped: bool) -> bool:
        assert self._core is not None, "there is no memory to release before the model is loaded"
        self._core.is_paused = is_stopped
        return self._core.is_running

    @override
    async def release_memory(self, weights: str) -> None:
        if self._core is not None:
            self._core.forget()
        await self._engine.release(weights)
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    @override
    async def take_memory(self, handle: PoolHandle) -> None:
        # As it was read, whatever has become of its files: weights that were kept are those.
        spec = self._spec
        pool = self._pool = take_pool(self._host, self._config, spec, handle)
        assert self._core is not None, "memory is taken back after it was released"
        self._core.adopted = msgspec.structs.replace(self._core.adopted, incarnation=handle.incarnation)
        await self._engine.take(self.ctx, self._persistent, spec, pool)

    async def _read_model(self) -> ModelSpec:
        """In a thread, as it may read all weights: no heartbeat would be sent for seconds."""
        # The echo model has no files, and does everything on the event loop.
        has_files = self._config.model.partition("?")[0] != "echo"
        return await asyncio.to_thread(self._config.spec) if has_files else self._config.spec()

    @property
    def _depth(self) -> int:
        return DEVICE_DEPTH if self._engine.runs_ahead else 1

    @property
    def _releases_in_place(self) -> bool:
        """Whether it lives on without its memory. Ranks of several end, and their successors wait for it."""
        return self._config.tp_size == 1

    def _on_order(self, call: Call, order: LetGo | TakeUp) -> None:
        if self._core is not None and (self._releases_in_place or isinstance(order, TakeUp)):
            self._memory.on_order(call, order)
        elif isinstance(order, LetGo) and self._pool is None:
            call.reply(HasLetGo(group=order.group, number=order.number))
        else:
            call.fail("not_ready", "the worker is ending or still loading its model", retryable=True)
            if isinstance(order, LetGo):
                self.ctx.end(f"the memory of {order.group} must be released")

    def _on_refusal(self, error: CallError) -> None:
        if error.code == MEMORY_RELEASED:
            self.ctx.announce(RELEASED, group=self._config.group)

    def _leave(self, reason: str) -> None:
        """The group of ranks is over: end, by SIGKILL if a thread may hang. If stopping or draining, it ends anyway."""
        if self._is_stopping or (self._core is not None and self._core.is_draining):
            return
        if not self._engine.is_threaded:
            self.ctx.end(reason)
        else:
            self._die(reason)

    def _watch_adoption(self) -> None:
        # A timer while a scheduler waits for its predecessor's steps: they end soon, or never.
        is_waiting = isinstance(self._core, RankCore) and self._core.num_deferred > 0
        if is_waiting and self._adopt_timer is None:
            grace_s = self._config.adopt_grace_s
            reason = f"a step has not ended {grace_s:g} s after another scheduler asked to adopt: not all ranks have it"
            self._adopt_timer = self.ctx.later(grace_s, self._leave, reason)
        elif not is_waiting and self._adopt_timer is not None:
            self._adopt_timer.cancel()
            self._adopt_timer = None

    def _on_fence(self, sender: Address, message: Fence) -> None:
        """End, so that the supervisor starts another worker; ignore a fence of another scheduler or worker epoch."""
        ours = (self._core.scheduler_epoch if self._core is not None else 0, self.ctx.address.epoch)
        if (message.scheduler_epoch, message.worker_epoch) == ours:
            self.ctx.fail(f"{sender} rejects this worker's answers: {message.reason}")

    def _dispatch(self, event: Event) -> None:
        if self._core is None or self._driver is None:
            self.ctx.metrics.count("mesh_worker_steps_refused_total", reason="not_ready")
            return
        if self._driver.feed(event) and not self._core.is_running:
            self._idle.set()
            self._memory.steps_ended()

    def _perform(self, command: Command) -> None:
        match command:
            case RunStep(runnable, opens, at):
                note_begin(self.ctx.trace, runnable, opens, self.ctx.now() - at)
                self._run(runnable)
            case SendResult():
                self._send_result(command)
            case TellMismatch(actor_id, mismatch):
                self._on_mismatch(actor_id, mismatch)
            case StepRefused(step, reason):
                self.ctx.metrics.count("mesh_worker_steps_refused_total", reason=reason)
                self.ctx.log.debug("step refused", step=step, reason=reason)
            case _:
                perform(command, self.ctx)

    def _send_result(self, command: SendResult) -> None:
        # Another scheduler has adopted this worker meanwhile: what waits is still its predecessor's.
        if self._results and self._scheduler != command.actor_id:
            self._tell_results()
        self._scheduler = command.actor_id
        self._results.append(command.result)
        if not command.may_wait:
            self._tell_results()
        elif self._results_timer is None:
            self._results_timer = self.ctx.later(RESULTS_WAIT_S, self._tell_results)

    def _tell_results(self) -> None:
        if self._results_timer is not None:
            self._results_timer.cancel()
            self._results_timer = None
        results, self._results = self._results, []
        if results:
            self.ctx.tell(self._scheduler, results[0] if len(results) == 1 else StepResults(results=results))

    def _on_mismatch(self, scheduler_id: str, mismatch: StepMismatch) -> None:
        self.ctx.metrics.count("mesh_worker_steps_refused_total", reason="mismatch")
        self.ctx.log.warning("step not run", step=mismatch.step, why=mismatch.reason)
        if self._ranks is None:
            self.ctx.tell(scheduler_id, mismatch)
        else:
            # The other ranks may be in the middle of it, and would wait for this one.
            self._leave(mismatch.reason)

    def _run(self, step: RunnableStep) -> None:
        if self._engine.is_threaded:
            self._watch.begun(step)
            self.ctx.spawn(self._run_in_thread(step), name="step")
            return
        started = self.ctx.now()
        try:
            outcome = run_isolated(self._engine.require(), step)
        except DeviceFailed as error:
            self._die_of(step, error)
            return
        if outcome.delay_s > 0:
            self._watch.begun(step)  # Not before: while the loop computes, none of its timers can fire.
            self.ctx.later(outcome.delay_s, self._done, step, outcome, started)
        else:
            self._done(step, outcome, started)

    async def _run_in_thread(self, step: RunnableStep) -> None:
        started = self.ctx.now()
        try:
            outcome = await self._engine.run(step)
        except Exception as error:  # noqa: BLE001 - errors of single rows are in the outcome
            if not self._is_stopping:
                self._die_of(step, error)
            return
        self._done(step, outcome, started)

    def _die_of(self, step: RunnableStep, error: Exception) -> None:
        """No row is to blame: the successor gets the step again."""
        self.ctx.log.error("device failed", step=step.step, traceback=traceback_of(error))
        self._die(f"the device failed in step {step.step}: {type(error).__name__}: {error}")

    def _on_hang(self, step: RunnableStep) -> None:
        self._die(f"step {step.step} has not ended within {step.timeout_s:g} s and counts as hung")

    def _die(self, reason: str) -> None:
        """Leave the steps to the next incarnation. A hung thread would hold up any gentler end."""
        self.ctx.log.error("dying", why=reason)
        # Buffered output does not survive SIGKILL, and the reason is the last of it.
        sys.stdout.flush()
        sys.stderr.flush()
        self._kill()

    def _done(self, step: RunnableStep, outcome: StepOutcome, started: float) -> None:
        self._watch.ended()
        now = self.ctx.now()
        # A step that was launched ahead has waited for the one before it.
        elapsed_s, self._last_end = now - max(started, self._last_end), now
        note_end(self.ctx.trace, step, elapsed_s)
        self.ctx.metrics.observe("mesh_worker_step_seconds", elapsed_s)
        self.ctx.metrics.count("mesh_worker_tokens_total", step.num_tokens)
        if outcome.failure:
            self._report(step, outcome.failure)
        # Errors are rare, and a step has hundreds of rows: request ids are looked up only when one is needed.
        names = {row.row: row.sequence.request_id for row in step.rows} if outcome.errors else {}
        for error in outcome.errors:
            self.ctx.metrics.count("mesh_worker_row_errors_total", code=error.code)
            request_id = names.get(error.row, "")
            self.ctx.log.warning(
                "row failed", request_id=request_id, step=step.step, row=error.row, code=error.code, why=error.message
            )
        self._dispatch(StepDone(outcome, elapsed_s))
        self._watch_adoption()

    def _report(self, step: RunnableStep, failure: str) -> None:
        """Report a batch that raised: a failure even if all of its rows succeeded when they ran alone."""
        self.ctx.metrics.count("mesh_worker_steps_failed_total")
        # An error in every step would flood the log with the same traceback.
        is_new, self._last_failure = failure != self._last_failure, failure
        traceback = failure if is_new else "same as before"
        self.ctx.log.warning(
            "step failed, its rows ran alone", step=step.step, rows=len(step.rows), traceback=traceback
        )


async def _possible_asks(spec: ModelSpec) -> list[str]:
    model = DrawnModel(spec.vocab_size, spec.eos_token_ids, spec)
    # The echo model has no tokenizer to load, and does everything on the event loop.
    asks = possible(model) if spec.source == "echo" else await asyncio.to_thread(possible, model)
    return asks if spec.pooling is None else [*asks, VECTORS]
