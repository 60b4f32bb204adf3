"""Pages on their way into an agent's stores and out of them: takes what schedulers tell to be stored, has the agent's
transports read from stores like from pools, and polls both.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import TransferError
from kvstore.hashing import HASH_BYTES
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import PoolHandle, StorePages
from kvstore.store.place import StoreIdentity
from mesh.actor import Context
from nodes.kv_agent.config import DiskConfig, PoolConfig
from nodes.kv_agent.stores.opening import OpenedStore, Opener, OpenStores, StoreConfig
from nodes.kv_agent.stores.watch import StoreWatch

if TYPE_CHECKING:
    from kvstore.store.source import StorePeer, StoreTransport


class StoreOwner(Protocol):
    """The actor, which may wait for the end of writes, and reads."""

    ctx: Context

    def wrote(self) -> None:
        """A group's `is_writing` may have changed."""
        ...

    def store_opened(self, source: str, layout_digest: bytes, transport: "StoreTransport") -> None:
        """A store can be read, over `transport`."""
        ...

    def has_read(self) -> None:
        """Transfers from a store have ended."""
        ...


class StoreTraffic:
    """See the module. `groups` are the configured pools by group and rank; `opener` opens a store.

    `counts` are pages that came to no store, by reason.
    """

    def __init__(
        self, owner: StoreOwner, config: StoreConfig, groups: Mapping[str, Sequence[PoolConfig]], opener: Opener
    ) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.stores = OpenStores(owner.ctx, config, groups, opener, self._wake, self._opened)
        self._pools: dict[str, Sequence[PagePool]] = {}
        self._told: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._is_due = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._worked = asyncio.Event()
        self._watch = StoreWatch(owner.ctx, self.stores)

    def on_pages(self, message: StorePages) -> None:
        """A scheduler has full pages: queue them. What does not come to be stored is a miss, and counted."""
        pools = self._pools.get(message.group)
        # A pool that was made anew begins with generations of its own, which may be those that were told.
        if pools is None or pools[0].info.incarnation != message.incarnation:
            self.counts["changed before"] += len(message.pages)
            return
        identity = self.stores.identity(message.group, message.numerics)
        opened = self.stores.get(identity)
        if opened is None:
            self.counts["not open"] += len(message.pages)
            self.stores.missed(identity, message.hashes)
            return
        from kvstore.store.index import PageName
        from kvstore.store.pool_writes import Storable

        columns = zip(message.pages, message.generations, message.hashes, message.parents, strict=True)
        offered = [
            Storable(page, generation, PageName(own, parent))
            for page, generation, own, parent in columns
            if len(own) == len(parent) == HASH_BYTES
        ]
        self.counts["changed before"] += len(message.pages) - len(offered)
        opened.writes.offer(message.group, offered)
        self.poll_soon()

    def connect(self, source: str) -> "list[StorePeer]":
        """The ranks of a store by its name, to be read like pools. Raises TransferError `source_lost`."""
        agent, epoch = self._owner.ctx.address
        found = next((one for one in self.stores.opened.items() if one[0].folder == source), None)
        if found is None:
            raise TransferError("source_lost", f"no store {source} is open at {agent}")
        identity, opened = found
        num_pages = opened.store.num_slots
        handles = [
            # Of slots and sequences that an earlier agent told of, none may be read: its epoch was another one.
            PoolHandle(group=source, agent=agent, path="", num_pages=num_pages, layout=rank.layout, incarnation=epoch)
            # All groups of an identity have layouts alike, rank by rank.
            for rank in self.stores.groups[self.stores.groups_of(identity)[0]]
        ]
        return [opened.transport.connect(handle) for handle in handles]

    def put(self, group: str, pools: Sequence[PagePool]) -> None:
        """Pages of these pools may be stored; called again, they replace the group's."""
        self._pools[group] = pools
        for identity, opened in self.stores.opened.items():
            if group in self.stores.groups_of(identity):
                opened.writes.add(group, pools)

    def take_away(self, group: str) -> None:
        """No write of a group's pages begins any more; those that run end as `is_writing` says."""
        self._pools.pop(group, None)
        for opened in self.stores.opened.values():
            opened.writes.remove(group)

    def is_writing(self, group: str) -> bool:
        return any(opened.writes.is_writing(group) for opened in self.stores.opened.values())

    async def drained(self) -> None:
        """Return when all that was offered is stored, or is known not to be."""
        await self.until(
            lambda: not self.stores.is_opening and all(one.writes.is_idle for one in self.stores.opened.values())
        )

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Return when that is met, which is looked at whenever stores have done something."""
        while not is_met():
            self._worked.clear()
            await self._worked.wait()

    def close(self) -> None:
        """Blocks until what was begun has ended. Pages that still wait are not stored."""
        self._is_closed = True
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        for opened in self.stores.opened.values():
            for group in self.stores.groups:
                opened.writes.remove(group)
            opened.transport.close()
            try:
                opened.store.close()
            except OSError as error:
                self._owner.ctx.log.warning("store not synced", why=error.strerror)
        self.stores.opened.clear()

    def poll_soon(self) -> None:
        # Once for all that a turn brings: each piece of work that ends wakes, and each offer does.
        if not self._is_due and not self._is_closed:
            self._is_due = True
            self._owner.ctx.later(0.0, self._poll)

    # inside

    def _opened(self, identity: StoreIdentity, opened: OpenedStore) -> None:
        self._owner.store_opened(identity.folder, identity.layout_digest, opened.transport)
        for group in self.stores.groups_of(identity):
            if group in self._pools:
                opened.writes.add(group, self._pools[group])
        self._tell_once("store buffered", opened.store.why_buffered)
        if isinstance(self.stores.config, DiskConfig):
            self._watch.begin()

    def _wake(self) -> None:
        """Called by a store's threads, which may outlive the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.poll_soon)

    def _poll(self) -> None:
        self._is_due = False
        if self._is_closed:
            return
        now = self._owner.ctx.now()
        pauses: list[float] = []
        for store, writes, transport in self.stores.opened.values():
            # Settles writes and begins others. Transfers that have ended are for the agent's puller.
            transport.work(now)
            if transport.has_ended:
                self._owner.has_read()
            if (pause_s := writes.pump(now)) is not None:
                pauses.append(pause_s)
            self._tell_once("store is only read", store.why_read_only)
        self._watch.tell()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if pauses:
            self._timer = self._owner.ctx.later(min(pauses), self.poll_soon)
        self._worked.set()
        self._owner.wrote()

    def _tell_once(self, what: str, why: str) -> None:
        if why and what not in self._told:
            self._told.add(what)
            self._owner.ctx.log.warning(what, why=why)
