"""The process that owns the memory of its host's KV pools and is the only one to write transferred pages.

It makes the pools (or takes over what an earlier agent left), tells workers and schedulers where they are, and pulls
announced pages into granted ones. All decisions are in `core.py`; this file receives events, passes them to it, and
performs its commands.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override

from kvstore.errors import DeviceError, DeviceFault, KVError
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.page_pool import MemoryHost, PagePool, ShmHost
from kvstore.protocol import (
    AnnouncePages,
    CloseGrant,
    ClosePair,
    MapPool,
    OfferPair,
    OpenGrants,
    PagesPulled,
    PoolHandle,
    SendPages,
    StorePages,
    TransferFailed,
    TransferNews,
)
from kvstore.transfer.base import Peer
from kvstore.transfer.paired.link import LinkMaker
from kvstore.transfer.paired.pair import PAIR_ABORTED
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.session import CopyEnded
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.calls.batches import cut
from mesh.errors import CallError
from mesh.membership.view import Member
from mesh.runtime.driver import CoreDriver, perform
from mesh.runtime.effects import Asked, Reply, Tell, Told
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Buffer
from mesh.wire.codec import Codec
from mesh.wire.message import HotMessage, Message
from nodes.kv_agent.config import Bounds, KVAgentConfig
from nodes.kv_agent.control_channel import MeshChannel
from nodes.kv_agent.core import AgentCore
from nodes.kv_agent.events import (
    CancelPull,
    Command,
    CopyDone,
    Draining,
    Event,
    MapForeign,
    PeerGone,
    SourceId,
    SourceMapped,
    SourceRefused,
    SourceReleased,
    StartPull,
    StoreHeld,
    Tick,
    UnmapForeign,
)
from nodes.kv_agent.memory.actions import MemoryActions
from nodes.kv_agent.metrics import gauges, transport_gauges
from nodes.kv_agent.pools.facts import Pool
from nodes.kv_agent.pools.foreign import ForeignPools
from nodes.kv_agent.pools.held import HeldBy, HeldPools
from nodes.kv_agent.pools.own import held_bytes, is_read
from nodes.kv_agent.pools.taking import take_when_free
from nodes.kv_agent.stores.answers import STORE_ASKS, StoreAnswers, answer_without_stores
from nodes.kv_agent.stores.opening import Opener, open_store
from nodes.kv_agent.stores.traffic import StoreTraffic
from nodes.kv_agent.transports import make_transports
from nodes.protocol.memory import HasLetGo, LetGo, ListMemory, ReleaseMemory, ResumeMemory
from nodes.roles import KV_AGENT, NODE_CODEC

if TYPE_CHECKING:
    from kvstore.store.source import StoreTransport

# Size of one transfer's news on the wire; a failure has a sentence in it.
_NEWS_BYTES: Final = 512


class KVAgent(Actor, HeldBy):
    """See the module. `host` is where pools live: files by default, the heap in simulations.

    `links` are the engines of transports between agents, by name; if given, they replace the real ones. `open_store`
    opens a store of pages on disk.
    With pools on CUDA devices its process must be spawned, not forked (see `kvstore/pool/cuda/memory.py`).
    """

    role: ClassVar[str] = KV_AGENT
    codec: ClassVar[Codec] = NODE_CODEC

    def __init__(
        self,
        config: KVAgentConfig,
        host: MemoryHost | None = None,
        links: Mapping[str, LinkMaker] | None = None,
        open_store: Opener = open_store,
    ) -> None:
        self._config = config
        self._host: MemoryHost = host or CudaHost(ShmHost(config.directory))
        self._channel = MeshChannel(self, self._keep_pumping)
        self.transports = make_transports(config, self._host, self._channel, self._announce_fallbacks, links)
        self.pulls = PagePuller(self.transports)
        # For each group the pools of all its ranks; the page table in use is that of rank 0.
        self.ranks: dict[str, list[PagePool]] = {}
        self._peers: dict[SourceId, list[Peer]] = {}
        self._foreign = ForeignPools(self.transports, config.limits.map_s)
        self._driver = CoreDriver[Event, Command](
            self,
            "kv_agent",
            lambda event, now: self.core.handle(event, now),
            self._perform,
            setup={"config": config},
        )
        self._timer = DeadlineTimer(lambda: self.ctx, lambda: self.core.next_deadline, lambda _: self.feed(Tick()))
        self._pumping: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None
        # News from this turn of the loop, by scheduler.
        self._news: dict[str, list[PagesPulled | TransferFailed]] = {}
        self.core = AgentCore("", [], Bounds())
        self._memory: MemoryActions | None = None
        self._open_store = open_store
        self.stores: StoreTraffic | None = None
        self._store_answers: StoreAnswers | None = None
        self._told_refusals: set[str] = set()

    async def start(self) -> None:
        """Raises PoolError, or TransferError `tcp_unavailable`; nothing is left half made."""
        wake = self._waker()
        for transport in self.transports.transports:
            if where := transport.open(wake):
                self.ctx.log.info(transport.name, address=where)
        facts: list[Pool] = []
        config = self._config
        for group, wanted in config.groups.items():
            taken = await take_when_free(self.ctx, self._host, config.prefix, wanted, config.device_wait_s)
            self.ranks[group] = [pool for pool, _ in taken]
            for pool, found in taken:
                facts.append(Pool.from_info(pool.path, pool.info))
                self.ctx.log.info("pool", group=group, found=found, bytes=held_bytes(pool), path=pool.path)
        bounds = Bounds(config.max_grants, config.max_remembered, config.limits)
        self.core = AgentCore(self.ctx.address.actor_id, facts, bounds)
        self.core.note = self.ctx.trace.note
        if (kept := config.disk or config.store) is not None:
            self.stores = StoreTraffic(self, kept, config.groups, self._open_store)
            self._store_answers = StoreAnswers(self.ctx, self.stores)
        held = HeldPools(self, self.ranks, self.pulls, self.transports)
        wait_s = config.device_wait_s
        self._memory = MemoryActions(held, self._host, self.ranks.values(), config.prefix, wait_s)
        self._memory.on_members(())

    # what `HeldPools` and `StoreTraffic` need

    def wrote(self) -> None:
        if self._memory is not None:
            self._memory.copies_changed()

    def store_opened(self, source: str, layout_digest: bytes, transport: "StoreTransport") -> None:
        self.transports.join(transport)
        self.feed(StoreHeld(source, self.ctx.address.epoch, layout_digest))

    def has_read(self) -> None:
        self._pump_soon()

    def on_tell(self, sender: Address, message: Message | HotMessage, buffers: Sequence[Buffer]) -> None:
        if isinstance(message, AnnouncePages):
            self.feed(Told(sender, message))
        elif isinstance(message, StorePages) and self.stores is not None:
            self.stores.on_pages(message)
        elif isinstance(message, ClosePair) and self._channel.inbox.transports:
            self._channel.inbox.pair_failed(message.pair, PAIR_ABORTED, f"{sender.actor_id} closed the pair")
            self._keep_pumping()
        else:
            super().on_tell(sender, message, buffers)

    def on_ask(self, call: Call) -> None:
        message = call.message
        if isinstance(message, OfferPair | SendPages) and self._channel.inbox.transports:
            self._channel.on_ask(call)
        elif isinstance(message, STORE_ASKS) and self._store_answers is not None:
            self._store_answers.on_ask(call)
        elif isinstance(message, STORE_ASKS):
            answer_without_stores(self.ctx, call)
        elif isinstance(message, ReleaseMemory | ResumeMemory | ListMemory) and self._memory is not None:
            self._memory.on_ask(call)
        elif isinstance(message, LetGo):
            self._let_go(call, message)
        elif isinstance(message, MapPool | OpenGrants | CloseGrant):
            self.feed(Asked(call.sender, message, call))
        else:
            super().on_ask(call)

    def _let_go(self, call: Call, order: LetGo) -> None:
        """Another agent wants its pool unmapped: no copy from it begins, and running ones end."""
        source = SourceId(call.sender.actor_id, order.group)
        self._foreign.let_go(source)
        self.feed(SourceReleased(source))
        if is_read(self.core.sessions, source):
            call.fail("not_ready", f"pages of {order.group} are still being copied", retryable=True)
        else:
            call.reply(HasLetGo(group=order.group, number=order.number))

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        self._foreign.agent_lost(peer.actor_id)
        self.transports.agent_lost(peer.actor_id)
        self.feed(PeerGone(peer, reason))
        if self._memory is not None:
            self._memory.on_peer_lost(peer)

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        if self._memory is not None:
            self._memory.on_members(left)

    async def drain(self) -> None:
        """Open no more grants; return when those that are open have ended, by their deadlines at the latest.

        Pages that were told to be stored are stored first.
        """
        self.feed(Draining())
        if self.core.num_live:
            self._idle = asyncio.Event()
            await self._idle.wait()
        if self.stores is not None:
            await self.stores.drained()

    async def stop(self) -> None:
        """Close the pools, and remove their segments unless the configuration leaves them to the next agent."""
        self._timer.cancel()
        if self._pumping is not None:
            self._pumping.cancel()
        if self._memory is not None:
            self._memory.stop()
        self.transports.close()
        if self.stores is not None:
            self.stores.close()
        # After the transports are closed: a copy still running would write into what is freed here.
        for pool in (pool for pools in self.ranks.values() for pool in pools):
            try:
                pool.close()
            except DeviceError as error:
                # Its memory on a failed device is freed when this process ends.
                self.ctx.log.warning("pool not freed", group=pool.info.group, why=error.message)
            if self._config.unlink_on_stop:
                self._host.unlink(pool.path)
        self.ranks.clear()
        self._peers.clear()

    def stats(self) -> dict[str, float]:
        figures = gauges(self.core)
        for group, pools in self.ranks.items():
            figures[f'mesh_kv_pool_pages{{group="{group}"}}'] = float(pools[0].num_pages - 1)
            figures[f'mesh_kv_pool_bytes{{group="{group}"}}'] = float(sum(map(held_bytes, pools)))
        if self._store_answers is not None:
            figures |= self._store_answers.gauges()
        return figures | transport_gauges(self.transports)

    # inside

    def _announce_fallbacks(self) -> None:
        """Pages of an agent now come over a fallback, or over the first choice again."""
        fallbacks = self.transports.fallbacks
        self.ctx.log.warning("fallbacks", now=fallbacks)
        self.ctx.announce(fallbacks=fallbacks)

    @override
    def feed(self, event: Event) -> None:
        if not self._driver.feed(event):
            return
        if self._idle is not None and not self.core.num_live:
            self._idle.set()
        if self._memory is not None:
            self._memory.copies_changed()
        self._timer.arm()
        self._keep_pumping()

    def _perform(self, command: Command) -> None:
        match command:
            case MapForeign(source):
                self.ctx.spawn(self._map_foreign(source), name=f"map {source.agent}/{source.group}")
            case UnmapForeign(source):
                self.unmap(source)
            case StartPull():
                self._start_pull(command)
            case CancelPull(grant_id, copy_id):
                self.pulls.cancel(grant_id, copy_id)
            case Tell(receiver, message):
                if not self._news:
                    self.ctx.later(0.0, self._tell_news)
                self._news.setdefault(receiver, []).append(message)
            case Reply(call, PoolHandle() as pool):
                # From this answer on the caller may have the pool mapped, so it must be asked before that is freed. One
                # that has left gets no answer, and nobody would say again that it is gone.
                if not call.done and self._memory is not None:
                    call.reply(pool)
                    self._memory.on_mapped(pool.group, call.sender)
            case _:
                perform(command, self.ctx)

    def _tell_news(self) -> None:
        news, self._news = self._news, {}
        for receiver, messages in news.items():
            for some in cut(messages, lambda _: _NEWS_BYTES):
                pulled = [news for news in some if isinstance(news, PagesPulled)]
                failed = [news for news in some if isinstance(news, TransferFailed)]
                self.ctx.tell(receiver, TransferNews(pulled=pulled, failed=failed))

    def _start_pull(self, command: StartPull) -> None:
        try:
            source = self._source(command.source)
        except KVError as error:
            ended = CopyEnded(command.copy.copy_id, error.code, error.message)
        else:
            found = source[0].info.incarnation
            # The announcement may be older than the mapping: then its page numbers are those of another pool.
            if found == command.incarnation:
                started = self.pulls.start(command.grant_id, command.copy, command.group, source)
                if started is None:
                    return
                ended = started.event
            else:
                message = f"the pool of {command.source.group} now has incarnation {found}"
                ended = CopyEnded(command.copy.copy_id, "source_changed", message)
        self.feed(CopyDone(command.grant_id, ended, 0))

    def _source(self, source: SourceId) -> list[Peer]:
        """The mappings of a source's pools, by rank; the agent's own pools are mapped read-only like any other."""
        peers = self._peers.get(source)
        if peers is None:
            own = self.ranks.get(source.group)
            if own is not None:
                peers = [self.transports.connect_own(pool) for pool in own]
            else:
                assert self.stores is not None, "the core knows of no other source that is this agent's"
                peers = list[Peer](self.stores.connect(source.group))
            self._peers[source] = peers
        return peers

    async def _map_foreign(self, source: SourceId) -> None:
        try:
            peers = await self._foreign.connect(self.ctx, source)
        except CallError as error:
            refused = SourceRefused(source, error.code, f"asking {source.agent} for its pool failed: {error.message}")
        except KVError as error:
            refused = SourceRefused(source, error.code, error.message)
        else:
            self.unmap(source)
            self._peers[source] = peers
            info = peers[0].info
            self.feed(SourceMapped(source, info.incarnation, info.layout.digest))
            return
        self.feed(refused)

    @override
    def unmap(self, source: SourceId) -> None:
        for peer in self._peers.pop(source, ()):
            self.transports.disconnect(peer)

    def _keep_pumping(self) -> None:
        if self._pumping is None and self.pulls.is_busy:
            self._pumping = self.ctx.later(self.transports.pause_s, self._pump)

    def _waker(self) -> Callable[[], None]:
        """A function that threads call when there is something to pump."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # A thread may outlive the loop, and have something to report then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._pump_soon)

        return wake

    def _pump_soon(self) -> None:
        # Each reason is among them from the start, for its counter.
        seen = {why for why, count in self.transports.refused.items() if count}
        for why in seen - self._told_refusals:
            # Once per reason: a port scanner would fill the log.
            self._told_refusals.add(why)
            self.ctx.log.warning("kv_connection_refused", why=why)
        if self._pumping is not None:
            self._pumping.cancel()
            self._pumping = self.ctx.later(0.0, self._pump)

    def _pump(self) -> None:
        """Copy for a moment, then let the loop breathe."""
        self._pumping = None
        failure = ""
        for ended in self.pulls.pump(self.ctx.now()):
            self.feed(CopyDone(*ended))
            if ended.event.code == DeviceFault.code:
                failure = ended.event.message
        if failure := failure or self.transports.device_failure:
            # Nothing that this process does on the device can succeed any more; the next one makes the pools again.
            self.ctx.fail(f"a device failed: {failure}")
        if self._memory is not None:
            # The core does not know of pages sent to other agents.
            self._memory.copies_changed()
        self._keep_pumping()
