"""The scheduler process: maps its pool, then turns what arrives into events and performs what the core says.

Decides nothing; see `core.py`. Events of one loop turn are followed by one `Wake`, so that a burst of submissions makes
one step; a step's result is followed by its `Wake` at once, because the worker waits for the next step.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from kvstore.cache.allocator import PageState
from kvstore.cache.eviction import POLICIES
from kvstore.cache.rebuild import Rebuilt, rebuild
from kvstore.errors import PoolReleased
from kvstore.pool.mapping import map_pool
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import MapPool, OpenStore, PoolHandle
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import STALE_EPOCH, CallError, RemoteError, Superseded
from mesh.membership.view import DRAINING, READY, RELEASED, STARTING, Member
from mesh.runtime.driver import CoreDriver, perform
from mesh.runtime.effects import Answered, Asked, Outcome, Tell, Told
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Buffer, Channel
from mesh.wire.codec import Codec
from mesh.wire.frames import PeerDown
from mesh.wire.message import HotMessage, Message
from nodes.actor_figures import KV_USAGE, RUNNING, WAITING
from nodes.numerics import scheduler_numerics
from nodes.protocol import Adopt, Adopted, AttemptFailed, HasLetGo, LetGo, StepResult, StepResults
from nodes.protocol.memory import MEMORY_RELEASED
from nodes.redaction import PromptRedactor
from nodes.request import Stages
from nodes.roles import NODE_CODEC, SCHEDULER, SchedulerAttributes, drained_by_wish, is_replaced
from nodes.scheduler.asks import ASK_RETRY_S
from nodes.scheduler.config import ConfigError, SchedulerConfig
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.events import (
    Announce,
    Command,
    DrainAsked,
    Event,
    FenceWorker,
    FollowerReset,
    Measured,
    MembersChanged,
    MemoryWanted,
    PagesDamaged,
    PeerLost,
    ReadyPeer,
    Wake,
    WorkerDied,
)
from nodes.scheduler.worker_link.pipeline import ADOPT_TIMEOUT_S


class SchedulerActor(Actor):
    """One scheduler. `host` is where pools are mapped from."""

    role: ClassVar[str] = SCHEDULER
    codec: ClassVar[Codec] = NODE_CODEC
    kept: ClassVar[tuple[str, ...]] = (*RUNNING, *WAITING, KV_USAGE)
    # Ready once the worker is ours: before that every request would only wait.
    ready_after_start: ClassVar[bool] = False

    def __init__(self, config: SchedulerConfig, host: MemoryHost) -> None:
        self._config = config
        self._host = host
        self._pool: PagePool | None = None
        self.core: SchedulerCore | None = None
        self._driver: CoreDriver[Event, Command] | None = None
        self._is_waking = False
        self._timer = DeadlineTimer(
            lambda: self.ctx, lambda: None if self.core is None else self.core.next_deadline(), lambda _: self._wake()
        )
        self._drained = asyncio.Event()
        self._persistent = PersistentAsk(ASK_RETRY_S)
        self._is_wanted_back = asyncio.Event()
        self._is_released = False

    async def start(self) -> None:
        """Map the pool and take over what an earlier incarnation left in it.

        Transfers into the pool have ended once the agent answers, and that incarnation's steps once the worker does;
        until both have, the page table may still change. Raises PoolError, ConfigError, Superseded if a later scheduler
        has the worker, or the error with which agent or worker refuse.

        While the group's memory is released this waits; if it is released meanwhile, this starts over.
        """
        while (handle := await self._take_over()) is None:
            self._is_wanted_back.clear()
        address = self.ctx.address
        pool = self._pool
        assert pool is not None, "the pool was taken over"
        # Only now: agent and worker have both answered, so no earlier copy or step writes any more.
        policy = POLICIES[self._config.eviction]()
        found = rebuild(pool.table(), group=self._config.group, epoch=address.epoch, policy=policy)
        # These were lent to transfers or are torn, and nothing writes them any more.
        found.cache.clear_quarantined(found.quarantined)
        self._report(found)
        core = self.core = SchedulerCore(
            self._config, address, handle, found.cache, os.urandom(8).hex(), found.recovered
        )
        self.ctx.metrics.begin("mesh_scheduler_page_entries_refused_total", reason=("torn", "contradictory"))
        core.books.outbox.note, core.books.outbox.step = self.ctx.trace.note, self.ctx.trace.step
        self._driver = CoreDriver(
            self,
            "scheduler",
            core.handle,
            self._perform,
            setup={"config": self._config, "address": address, "pool": handle},
            redact=PromptRedactor,
        )
        for command in core.start(self.ctx.now()):
            self._perform(command)
        self.on_members([], [], [])

    async def _take_over(self) -> PoolHandle | None:
        """Map the pool, adopt the worker, have the store opened.

        None if the memory is wanted back meanwhile, or the worker is on another pool.
        """
        handle = await self._ask_until_answered(self._config.agent, MapPool(group=self._config.group), "the pool")
        if handle.layout.page_size != self._config.page_size:
            raise ConfigError(
                f"the pool of {self._config.group} has pages of {handle.layout.page_size} tokens, but this scheduler "
                f"is set to {self._config.page_size}: give both the same page size"
            )
        try:
            pool = self._pool = map_pool(self._host, handle)
        except PoolReleased:
            # The memory was wanted back while the answer was under way; the next answer will say so.
            return None
        if self._is_released:
            # An agent that starts now learns which actors map its pools from what they announce.
            self._is_released = False
            self.ctx.announce(STARTING)
        taking = asyncio.ensure_future(self._take_worker())
        wanted_back = asyncio.ensure_future(self._is_wanted_back.wait())
        try:
            await asyncio.wait((taking, wanted_back), return_when=asyncio.FIRST_COMPLETED)
            if taking.done() and not wanted_back.done() and taking.result():
                return handle
        finally:
            taking.cancel()
            wanted_back.cancel()
        pool.close()
        self._pool = None
        # Scheduler and worker know of different pools; both will hear of the later one.
        await asyncio.sleep(ASK_RETRY_S)
        return None

    async def _take_worker(self) -> bool:
        """Adopt the worker, and have the agent open its store, if it has one; False if the worker is on another pool.

        Raises RemoteError, also with what is wrong with the disk.
        """
        adopted = await self._adopt_all()
        if any(map(self._is_elsewhere, adopted)):
            return False
        if self._config.stores:
            # Here, where a release is noticed: reserving the space of a store may take a disk minutes.
            opening = OpenStore(group=self._config.group, numerics=adopted[0].numerics)
            await self._ask_until_answered(self._config.agent, opening, "the store of KV pages")
        return True

    async def _adopt_all(self) -> list[Any]:
        """Every rank's `Adopted`. All are asked at once: a rank adopted alone would leave others waiting in a step."""
        adopt = Adopt(scheduler_epoch=self.ctx.address.epoch)
        asks = [self._ask_until_answered(rank, adopt, "the worker") for rank in self._config.ranks]
        try:
            return await asyncio.gather(*asks)
        except RemoteError as error:
            if error.code == STALE_EPOCH and error.known_epoch > self.ctx.address.epoch:
                # The next incarnation goes above that epoch: going up by one per start would take as many starts as the
                # seconds that a clock was set back.
                raise Superseded(error.message, error.known_epoch) from error
            raise

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        if isinstance(message, StepResult | StepResults):
            # The wake follows right here, so none needs to be scheduled for the end of the turn.
            self._is_waking = True
            self._handle(Told(sender, message))
            self._wake()
        else:
            self._handle(Told(sender, message))

    def on_ask(self, call: Call) -> None:
        if isinstance(call.message, LetGo):
            self._let_go(call, call.message)
        elif self.core is None:
            call.fail("not_ready", "the pool and its worker are not taken over yet", retryable=True)
        else:
            self._handle(Asked(call.sender, call.message, call))

    def _let_go(self, call: Call, order: LetGo) -> None:
        """Give everything back. The next incarnation waits until there is memory, and knows nothing of this one."""
        if self.core is None:
            self._is_wanted_back.set()
        else:
            self._handle(MemoryWanted())
            self.ctx.end(f"the memory of {order.group} is released")
        call.reply(HasLetGo(group=order.group, number=order.number))

    def on_subscriber_reset(self, subscriber: Address, topic: str) -> None:
        """A tokenizer missed more cache events than are kept for it: state what is cached again."""
        self._handle(FollowerReset(topic))

    @override
    def on_peer_lost(self, peer: Address, reason: str) -> None:
        self._handle(PeerLost(peer))

    @override
    def on_peer_down(self, sender: Address, down: PeerDown) -> None:
        if down.actor_id in self._config.ranks:
            self._handle(WorkerDied(Address(down.actor_id, down.epoch)))

    @override
    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        self._persistent.members_changed()
        numerics = scheduler_numerics(self.ctx.members.all())
        ready = {
            one.actor_id: ReadyPeer(one.role, one.epoch, numerics.get(one.actor_id, ""))
            for one in self.ctx.members.all()
            if one.state == READY
        }
        # A draining actor with nothing to finish may have left before it was seen draining.
        draining = {one.actor_id for one in (*self.ctx.members.all(), *left) if one.state == DRAINING}
        self._handle(MembersChanged(ready, draining - ready.keys(), drained_by_wish(self.ctx.members)))
        config, pool = self._config, self._pool
        if pool is not None and is_replaced(self.ctx.members, config.agent, config.group, pool.info.incarnation):
            self.ctx.end(f"{config.agent} has made a new pool for {config.group}")

    async def drain(self) -> None:
        """Refuse new work; return when all attempts, orders and handoffs are over, and gateways have what they gave.

        Otherwise the last tokens, which come by way of a detokenizer, could arrive after the word that this actor is
        gone: an attempt that was complete would be lost, and maybe there is nobody left to take another.
        """
        if self.core is not None:
            self._handle(DrainAsked())
            await self._drained.wait()

    async def stop(self) -> None:
        self._timer.cancel()
        self.core = None
        if self._pool is not None:
            self._pool.close()

    def totals(self) -> dict[str, float]:
        if self.core is None:
            return {}
        results, cache = self.core.results, self.core.books.cache
        return {
            "mesh_scheduler_prefix_query_tokens": float(cache.num_query_tokens),
            "mesh_scheduler_prefix_hit_tokens": float(cache.num_hit_tokens),
            "mesh_scheduler_computed_tokens": float(results.num_computed_tokens),
            "mesh_scheduler_output_tokens": float(results.num_output_tokens),
            "mesh_scheduler_steps": float(self.core.pipeline.last_step),
            "mesh_scheduler_step_seconds": self.core.pipeline.steps_s,
        }

    @override
    def stats(self) -> dict[str, float]:
        return {} if self.core is None else self.core.stats()

    # inside

    def _report(self, found: Rebuilt) -> None:
        """Log what was found, if anything; damage is a warning, because no scheduler's death leaves any."""
        num_cached, num_exported = found.cache.num_pages_in(PageState.CACHED), len(found.quarantined) - found.num_torn
        figures = {"cached": num_cached, "recovered": len(found.recovered), "exported": num_exported}
        if not (found.num_torn or found.num_dropped):
            if num_cached:
                self.ctx.log.info("cache rebuilt", **figures)
            return
        for reason, number in (("torn", found.num_torn), ("contradictory", found.num_dropped)):
            self.ctx.metrics.count("mesh_scheduler_page_entries_refused_total", number, reason=reason)
        self.ctx.log.warning(
            "cache rebuilt without damaged page table entries",
            torn=found.num_torn, dropped=found.num_dropped, **figures,
        )  # fmt: skip

    async def _ask_until_answered(self, actor_id: str, message: Message, what: str) -> Any:
        return await self._persistent.ask(
            self.ctx, actor_id, message, timeout_s=ADOPT_TIMEOUT_S, what=what, refused=self._on_refusal
        )

    def _on_refusal(self, error: CallError) -> None:
        if error.code != MEMORY_RELEASED or self.core is not None:
            return
        if self._pool is not None:
            # The worker has let go already. An actor that announces `released` must map nothing, so the pool is
            # unmapped and the agent asked first.
            self._is_wanted_back.set()
        else:
            config = self._config
            self._is_released = True
            self.ctx.announce(RELEASED, group=config.group, phase=config.phase, page_size=config.page_size)

    def _handle(self, event: Event) -> None:
        """Feed the core. Its `Wake` follows at the end of the loop turn."""
        if self.core is None or self._driver is None:
            return
        self._driver.feed(event)
        if not self._is_waking:
            self._is_waking = True
            # One wake for all events of a turn: each wake plans a step, and a burst of submissions is better off with
            # one step than with many.
            self.ctx.later(0.0, self._wake_if_due)

    def _wake_if_due(self) -> None:
        if self._is_waking:
            self._wake()

    def _wake(self) -> None:
        self._is_waking = False
        core = self.core
        if core is None or self._driver is None:
            return
        self._driver.feed(Wake())
        self._timer.arm()
        if core.handlers.is_draining and core.is_drained and not core.books.attempts.num_finished:
            self._drained.set()

    def _perform(self, command: Command) -> None:
        match command:
            case FenceWorker(worker, message):
                self.ctx.log.error("worker fenced", worker=f"{worker}.{message.worker_epoch}", why=message.reason)
                self.ctx.tell(worker, message, channel=Channel.CONTROL)
            case Measured(stages):
                self._observe(stages)
            case PagesDamaged(num_pages, violations):
                pages = [f"{page} is {found}, should be {needed}" for page, found, needed in violations]
                self.ctx.log.error("pages quarantined: the books disagreed about them", number=num_pages, pages=pages)
            case Announce(state, worker_ready, numerics, asks):
                attributes = SchedulerAttributes(
                    group=self._config.group,
                    phase=self._config.phase,
                    page_size=self._config.page_size,
                    worker_ready=worker_ready,
                    policy=self._config.policy,
                    numerics=numerics,
                    # The worker has mapped the same pool, and was refused it unless its weights have this fingerprint.
                    weights="" if self._pool is None else self._pool.info.layout.fingerprint,
                    asks=list(asks),
                    damaged_pages=0 if self.core is None else self.core.idle_check.num_found,
                )
                self.ctx.announce(state, **msgspec.structs.asdict(attributes))
            case _:
                if isinstance(command, Tell) and isinstance(command.message, AttemptFailed):
                    self._say_failed(command.message)
                perform(command, self.ctx, self._on_outcome)

    def _say_failed(self, message: AttemptFailed) -> None:
        # The gateway reports only what its client is told, and an attempt that failed here may go on elsewhere.
        self.ctx.log.info(
            "attempt failed",
            request_id=message.request_id,
            attempt=message.attempt,
            code=message.code,
            why=message.message,
        )

    def _observe(self, stages: Stages) -> None:
        observe = self.ctx.metrics.observe
        observe("mesh_request_queue_seconds", stages.queue_s)
        observe("mesh_request_prefill_seconds", stages.prefill_s)
        if stages.grant_s:
            observe("mesh_request_grant_seconds", stages.grant_s)
            observe("mesh_request_transfer_seconds", stages.transfer_s)

    def _is_elsewhere(self, message: Message | HotMessage) -> bool:
        """Whether an adopted worker computes on another incarnation of the pool than the one mapped here."""
        mapped = self._pool.info.incarnation if self._pool is not None else 0
        return isinstance(message, Adopted) and message.incarnation not in (0, mapped)

    def _on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Answered) and self._is_elsewhere(outcome.message):
            worker = outcome.sender.actor_id
            self.ctx.end(f"{worker} computes on another pool of {self._config.group} than the one mapped here")
        else:
            self._handle(outcome)
