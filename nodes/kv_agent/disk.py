"""The agent's stores of pages on disk: opens them when schedulers have told how their workers compute, feeds them, says
what is in them, and has the agent's transports read from them like from a pool. Or stores that another package installs
(`installed_store.py`), which may take longer to say what is in them.

One store for each model layout, number of ranks and numerics, shared by all groups that have pages like these. Nothing
of `kvstore/store` is imported before the first one is opened: it needs numpy, whose threads must not be in the process
that actors are forked from, nor its memory in a mesh that keeps no pages. Used by `actor.py`.
"""

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

import msgspec

from kvstore.errors import StoreError, TransferError
from kvstore.hashing import HASH_BYTES, split_hashes
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import (
    NOT_OPEN,
    FindStored,
    ListStoredPages,
    MissedPages,
    OpenStore,
    PoolHandle,
    StoreChanged,
    StoredFound,
    StoredPagesListed,
    StoredPrefix,
    StoredPrompt,
    StoreOpened,
    StorePages,
)
from kvstore.store.place import StoreFound, StoreIdentity
from mesh.actor import Call, Context
from nodes.kv_agent.config import DiskConfig, InstalledStoreConfig, PoolConfig
from nodes.kv_agent.installed_store import installed_gauges, open_installed
from nodes.kv_agent.misses import misses
from nodes.kv_agent.store_facts import facts_of_open, look_into, with_others
from nodes.kv_agent.store_watch import StoreWatch
from nodes.protocol.stores import (
    LOADING,
    AgentStores,
    FlushedStore,
    FlushStores,
    StoreFacts,
    StoreList,
    StoresFlushed,
)

if TYPE_CHECKING:
    from kvstore.store.interface import Store, Stored
    from kvstore.store.page_store import PageStore
    from kvstore.store.pool_writes import PoolWrites
    from kvstore.store.source import StorePeer, StoreTransport

_REASONS: Final[Mapping[str, Sequence[str]]] = {
    "not_open": ("not open", "not stored, off"),
    "queue_full": ("queue full",),
    "changed": ("changed before", "changed meanwhile"),
    "read_only": ("not stored, read only",),
    "write_failed": ("write failed", "lost"),
    "flushed": ("flushed",),
}
"""Why pages were not stored, for `/metrics`, and how the parts of a store name it."""
_UNOPENED: Final = 4096
"""As many as may wait to be written once it is open."""
GATHER_S: Final = 0.2
"""So long pages wait for others to be written with, unless these are a whole write: decode fills one at a time, and a
write of one costs three threads' turns and three system calls as one of 64 does. An agent that is killed loses them."""
AGAIN_S: Final = 30.0
"""After so long a store is opened again that could not be: what it connects to may have been away. As long as making
one may take, so that a line in the log for each says no more than that."""


class OpenedStore(NamedTuple):
    """A store, the pages on their way into it, and what alone may ask it for what has ended."""

    store: "Store"
    writes: "PoolWrites"
    transport: "StoreTransport"


StoreConfig = DiskConfig | InstalledStoreConfig
Opener = Callable[[StoreConfig, StoreIdentity, Callable[[], None]], Awaitable[OpenedStore]]


async def open_store(config: StoreConfig, identity: StoreIdentity, wake: Callable[[], None]) -> OpenedStore:
    """Raises StoreError of every kind. In a thread: a file system may write each block that it is to reserve."""
    if isinstance(config, InstalledStoreConfig):
        return feed_store(await open_installed(config, identity, wake), config)
    return await asyncio.to_thread(_open, config, identity, wake)


def _open(config: DiskConfig, identity: StoreIdentity, wake: Callable[[], None]) -> OpenedStore:
    from kvstore.store.directory import open_files
    from kvstore.store.page_store import PageStore

    files = open_files(config.directory, identity, config.size_bytes)
    return feed_store(PageStore(files, identity.page_bytes * identity.tp_size, wake), config)


def feed_store(store: "Store", config: StoreConfig) -> OpenedStore:
    from kvstore.store.pool_writes import PoolWrites, WriteLimits
    from kvstore.store.source import DISK, INSTALLED, StoreTransport

    writes = PoolWrites(store, WriteLimits(bytes_per_s=config.bytes_per_s, gather_s=GATHER_S))
    name = INSTALLED if isinstance(config, InstalledStoreConfig) else DISK
    return OpenedStore(store, writes, StoreTransport(store, writes, name))


class DiskOwner(Protocol):
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


class DiskStores:
    """See the module. `groups` are the configured pools by group and rank; `opener` opens a store."""

    def __init__(
        self, owner: DiskOwner, config: StoreConfig, groups: Mapping[str, Sequence[PoolConfig]], opener: Opener
    ) -> None:
        self._owner = owner
        self._config = config
        self._groups = groups
        self._opener = opener
        self._loop = asyncio.get_running_loop()
        self._pools: dict[str, Sequence[PagePool]] = {}
        self._opened: dict[StoreIdentity, OpenedStore] = {}
        self._opening: dict[StoreIdentity, asyncio.Task[OpenedStore | StoreError]] = {}
        self._failed_at: dict[StoreIdentity, float] = {}
        self._told: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._found_at: dict[StoreIdentity, float] = {}
        # Pages that came before their store was open, which knows why they are missing from then on.
        self._unopened: dict[StoreIdentity, deque[bytes]] = {}
        self._is_due = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._watch = StoreWatch(owner.ctx, self._stores, self._tell_changed)
        # By group, the scheduler that asks for its pages.
        self._askers: dict[str, str] = {}

    # what the agent tells

    def on_find(self, call: Call, message: FindStored) -> None:
        """Answer what is there: what is not known to be is a miss. A disk is known at once."""
        if self._is_unknown(call, message.group):
            return
        identity = self._identity(message.group, message.numerics)
        opened = self._opened.get(identity)
        if opened is None:
            # This agent has just replaced another one: what is there will be found by those that come later.
            self._open_again(identity)
            call.reply(StoredFound(found=[_unopened(prompt) for prompt in message.prompts]))
            return
        alike = msgspec.structs.replace(identity, numerics="")
        others = [
            other.store
            for theirs, other in self._opened.items()
            if theirs != identity and msgspec.structs.replace(theirs, numerics="") == alike
        ]
        wanted = [split_hashes(prompt.hashes) for prompt in message.prompts]

        def answer(stored: "list[Stored]") -> None:
            found = [
                StoredPrefix(
                    name=prompt.name,
                    slots=slots,
                    sequences=sequences,
                    missed=misses(opened.store, hashes[len(slots) :], others),
                )
                for prompt, hashes, (slots, sequences) in zip(message.prompts, wanted, stored, strict=True)
            ]
            # For `meshctl kv ls`: a store of which nothing is found for days may be removed.
            if any(prefix.slots for prefix in found):
                self._found_at[identity] = self._owner.ctx.now()
            epoch = self._owner.ctx.address.epoch
            call.reply(StoredFound(found=found, source=identity.folder, incarnation=epoch))

        opened.store.find(wanted, answer)

    def on_list_pages(self, call: Call, message: ListStoredPages) -> None:
        """Answer with a part of what is there, of which the asker tells those who route."""
        if self._is_unknown(call, message.group):
            return
        identity = self._identity(message.group, message.numerics)
        opened = self._opened.get(identity)
        if opened is None:
            self._open_again(identity)
            call.fail("store_not_open", f"the store of {message.group} is not open", retryable=True)
        elif not opened.store.is_loaded:
            call.fail(LOADING, f"what the store of {message.group} has is still being read", retryable=True)
        else:
            hashes, next_slot, used_after = opened.store.listed(message.first_slot, message.used_after)
            call.reply(StoredPagesListed(hashes=hashes, next_slot=next_slot, used_after=used_after))

    def connect(self, source: str) -> "list[StorePeer]":
        """The ranks of a store by its name, to be read like pools. Raises TransferError `source_lost`."""
        for identity, opened in self._opened.items():
            if identity.folder == source:
                return self._peers(identity, opened)
        raise TransferError("source_lost", f"no store {source} is open at {self._owner.ctx.address.actor_id}")

    def on_list(self, call: Call) -> None:
        self._owner.ctx.spawn(self._list(call), name="list stores")

    def on_flush(self, call: Call, message: FlushStores) -> None:
        if isinstance(self._config, InstalledStoreConfig):
            # It forgets pages by their names, and who knows what others have put there.
            why = f"{self._config.place} keeps what it has until it is emptied by its own means"
            call.fail("store_not_flushed", why)
            return
        meant = {
            identity.folder: opened
            for identity, opened in self._opened.items()
            if not message.folders or identity.folder in message.folders
        }
        loading = [folder for folder, opened in meant.items() if not opened.store.is_loaded]
        if loading:
            what = f"what {', '.join(loading)} has is still being read, or the store is off: `meshctl kv stats`"
            call.fail(LOADING, what, retryable=True)
            return
        self._owner.ctx.spawn(self._flush(call, meant), name="flush stores")

    def on_open(self, call: Call, message: OpenStore) -> None:
        if self._is_unknown(call, message.group):
            return
        self._owner.ctx.spawn(self._answer(call, message), name=f"open store of {message.group}")

    def on_pages(self, message: StorePages) -> None:
        """A scheduler has full pages: queue them. What does not come to be stored is a miss, and counted."""
        pools = self._pools.get(message.group)
        # A pool that was made anew begins with generations of its own, which may be those that were told.
        if pools is None or pools[0].info.incarnation != message.incarnation:
            self._counts["changed before"] += len(message.pages)
            return
        identity = self._identity(message.group, message.numerics)
        opened = self._opened.get(identity)
        if opened is None:
            self._counts["not open"] += len(message.pages)
            self._unopened.setdefault(identity, deque(maxlen=_UNOPENED)).extend(message.hashes)
            self._open_again(identity)
            return
        from kvstore.store.index import PageName
        from kvstore.store.pool_writes import Storable

        columns = zip(message.pages, message.generations, message.hashes, message.parents, strict=True)
        offered = [
            Storable(page, generation, PageName(own, parent))
            for page, generation, own, parent in columns
            if len(own) == len(parent) == HASH_BYTES
        ]
        self._counts["changed before"] += len(message.pages) - len(offered)
        opened.writes.offer(message.group, offered)
        self._poll_soon()

    def put(self, group: str, pools: Sequence[PagePool]) -> None:
        """Pages of these pools may be stored; called again, they replace the group's."""
        self._pools[group] = pools
        for identity, opened in self._opened.items():
            if self._is_of(group, identity):
                opened.writes.add(group, pools)

    def take_away(self, group: str) -> None:
        """No write of a group's pages begins any more; those that run end as `is_writing` says."""
        self._pools.pop(group, None)
        for opened in self._opened.values():
            opened.writes.remove(group)

    def is_writing(self, group: str) -> bool:
        return any(opened.writes.is_writing(group) for opened in self._opened.values())

    async def drained(self) -> None:
        """Return when all that was offered is stored, or is known not to be."""
        while self._opening or not all(opened.writes.is_idle for opened in self._opened.values()):
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """Blocks until what was begun has ended. Pages that still wait are not stored."""
        self._is_closed = True
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        for opened in self._opened.values():
            for group in self._groups:
                opened.writes.remove(group)
            opened.transport.close()
            try:
                opened.store.close()
            except OSError as error:
                self._owner.ctx.log.warning("store not synced", why=error.strerror)
        self._opened.clear()

    def gauges(self) -> dict[str, float]:
        """Figures of all stores together; those whose names end in `_total` begin at 0 with this agent."""
        counts, stored_bytes, queued = self._sums(), 0.0, 0
        is_buffered = is_read_only = is_off = False
        for store, writes, _ in self._opened.values():
            figures = store.stats()
            stored_bytes += figures.get("written", 0.0) * store.page_bytes
            queued += writes.num_queued
            is_buffered |= bool(store.why_buffered)
            is_read_only |= bool(store.why_read_only)
            is_off |= bool(store.why_off)
        figures = {
            "mesh_kv_disk_pages": float(counts["stored"]),
            "mesh_kv_disk_slots": float(counts["slots"]),
            "mesh_kv_disk_queued_pages": float(queued),
            "mesh_kv_disk_buffered": float(is_buffered),
            "mesh_kv_disk_read_only": float(is_read_only),
            "mesh_kv_disk_off": float(is_off),
            "mesh_kv_disk_stored_pages_total": float(counts["written"]),
            "mesh_kv_disk_stored_bytes_total": stored_bytes,
            "mesh_kv_disk_evicted_pages_total": float(counts["evicted"]),
            "mesh_kv_disk_corrupt_pages_total": float(counts["read corrupt"]),
            **{
                f'mesh_kv_disk_dropped_pages_total{{reason="{reason}"}}': float(number)
                for reason, number in _dropped(counts).items()
            },
        }
        if isinstance(self._config, InstalledStoreConfig):
            figures |= installed_gauges(counts)
        return figures

    # inside

    def _sums(self) -> Counter[str]:
        """What was counted here and in all stores, as the parts name it."""
        counts = Counter(self._counts)
        for store, writes, _ in self._opened.values():
            for name, number in (*store.stats().items(), *writes.counts.items()):
                counts[name] += int(number)
        return counts

    async def _list(self, call: Call) -> None:
        config = self._config
        is_disk = isinstance(config, DiskConfig)
        directory, size_bytes = (config.directory, config.size_bytes) if is_disk else (config.name, 0)
        found: Sequence[StoreFound] = await look_into(directory) if is_disk else ()
        now = self._owner.ctx.now()
        opened: list[StoreFacts] = []
        for identity, (store, writes, _) in self._opened.items():
            groups = [group for group in self._groups if self._is_of(group, identity)]
            at = self._found_at.get(identity)
            idle_s = None if at is None else now - at
            opened.append(facts_of_open(identity, store, writes.num_queued, groups, idle_s))
        kept = AgentStores(
            agent=self._owner.ctx.address.actor_id,
            directory=config.place,
            size_bytes=size_bytes,
            stores=with_others(opened, found),
            dropped=_dropped(self._sums()),
        )
        call.reply(StoreList(agents=[kept]))

    async def _flush(self, call: Call, meant: Mapping[str, OpenedStore]) -> None:
        agent = self._owner.ctx.address.actor_id
        flushed: list[FlushedStore] = []
        # Installed ones are refused before.
        stores = {folder: cast("PageStore", opened.store) for folder, opened in meant.items()}
        for folder, store in stores.items():
            meant[folder].writes.forget()
            flushed.append(FlushedStore(agent=agent, folder=folder, num_pages=store.flush()))
        self._poll_soon()
        while any(store.num_flushing for store in stores.values()):
            self._idle.clear()
            await self._idle.wait()
        self._owner.ctx.log.info("stores flushed", pages={one.folder: one.num_pages for one in flushed})
        for identity in [one for one in self._opened if one.folder in stores]:
            self._tell_changed(identity)
        failures = {folder: store.why_not_flushed for folder, store in stores.items()}
        if told := "; ".join(f"{folder}: {why}" for folder, why in failures.items() if why):
            call.fail("store_not_flushed", f"pages are forgotten until {agent} starts again, but its disk says {told}")
        else:
            call.reply(StoresFlushed(flushed=flushed))

    def _identity(self, group: str, numerics: str) -> StoreIdentity:
        layout = self._groups[group][0].layout
        return StoreIdentity(
            host=self._config.host,
            layout_digest=layout.digest,
            page_bytes=layout.page_bytes,
            tp_size=layout.tp_size,
            numerics=numerics,
        )

    def _is_of(self, group: str, identity: StoreIdentity) -> bool:
        return self._identity(group, identity.numerics) == identity

    def _peers(self, identity: StoreIdentity, opened: OpenedStore) -> "list[StorePeer]":
        # All groups of an identity have layouts alike, rank by rank.
        ranks = next(pools for group, pools in self._groups.items() if self._is_of(group, identity))
        agent, epoch = self._owner.ctx.address
        num_pages = opened.store.num_slots
        handles = [
            # Of slots and sequences that an earlier agent told of, none may be read: its epoch was another one.
            PoolHandle(
                group=identity.folder, agent=agent, path="", num_pages=num_pages, layout=rank.layout, incarnation=epoch
            )
            for rank in ranks
        ]
        return [opened.transport.connect(handle) for handle in handles]

    async def _answer(self, call: Call, message: OpenStore) -> None:
        opened = await self._open(self._identity(message.group, message.numerics))
        if isinstance(opened, StoreError):
            call.fail(opened.code, opened.message)
        else:
            call.reply(StoreOpened(group=message.group, num_pages=opened.store.num_slots))

    def _is_unknown(self, call: Call, group: str) -> bool:
        """Whether there is no pool of that group here, which is then the answer. Otherwise its asker is remembered."""
        if group in self._groups:
            self._askers[group] = call.sender.actor_id
            return False
        call.fail("unknown_group", f"{self._owner.ctx.address.actor_id} has no pool of group {group!r}")
        return True

    def _open_again(self, identity: StoreIdentity) -> None:
        """This agent has just replaced another one. What is wrong now was not when the scheduler started."""
        has_just_failed = self._owner.ctx.now() < self._failed_at.get(identity, -math.inf) + AGAIN_S
        if not has_just_failed and identity not in self._opening:
            self._owner.ctx.spawn(self._open(identity), name="open store again")

    async def _open(self, identity: StoreIdentity) -> OpenedStore | StoreError:
        """The store, opened once however many ask for it; or why it cannot be."""
        if identity in self._opened:
            return self._opened[identity]
        if identity not in self._opening:
            self._opening[identity] = self._owner.ctx.spawn(self._open_one(identity), name="open store")
        # Several may wait for it, and one of them may be cancelled.
        return await asyncio.shield(self._opening[identity])

    async def _open_one(self, identity: StoreIdentity) -> OpenedStore | StoreError:
        log = self._owner.ctx.log
        try:
            opened = await self._opener(self._config, identity, self._wake)
        except StoreError as error:
            self._failed_at[identity] = self._owner.ctx.now()
            log.warning("store refused", code=error.code, why=error.message, numerics=identity.numerics)
            return error
        finally:
            del self._opening[identity]
            self._idle.set()
        self._failed_at.pop(identity, None)
        self._opened[identity] = opened
        unopened = self._unopened.pop(identity, ())
        opened.store.missing.add_hashes([one for one in unopened if len(one) == HASH_BYTES], NOT_OPEN)
        self._owner.store_opened(identity.folder, identity.layout_digest, opened.transport)
        for group, pools in self._pools.items():
            if self._is_of(group, identity):
                opened.writes.add(group, pools)
        pages, folder = opened.store.num_slots, identity.folder
        log.info("store", place=self._config.place, folder=folder, pages=pages, numerics=identity.numerics)
        self._tell_once("store buffered", opened.store.why_buffered)
        if isinstance(self._config, DiskConfig):
            self._watch.begin()
        self._poll_soon()
        return opened

    def _wake(self) -> None:
        """Called by a store's threads, which may outlive the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._poll_soon)

    def _poll_soon(self) -> None:
        # Once for all that a turn brings: each piece of work that ends wakes, and each offer does.
        if not self._is_due and not self._is_closed:
            self._is_due = True
            self._owner.ctx.later(0.0, self._poll)

    def _poll(self) -> None:
        self._is_due = False
        if self._is_closed:
            return
        now = self._owner.ctx.now()
        pauses: list[float] = []
        for store, writes, transport in self._opened.values():
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
            self._timer = self._owner.ctx.later(min(pauses), self._poll_soon)
        self._idle.set()
        self._owner.wrote()

    def _stores(self) -> "list[tuple[StoreIdentity, Store]]":
        return [(identity, opened.store) for identity, opened in self._opened.items()]

    def _tell_changed(self, identity: StoreIdentity) -> None:
        for group, scheduler in self._askers.items():
            if self._is_of(group, identity):
                self._owner.ctx.tell(scheduler, StoreChanged(group=group))

    def _tell_once(self, what: str, why: str) -> None:
        if why and what not in self._told:
            self._told.add(what)
            self._owner.ctx.log.warning(what, why=why)


def _unopened(prompt: StoredPrompt) -> StoredPrefix:
    missed = MissedPages(why=NOT_OPEN, num=len(prompt.hashes) // HASH_BYTES)
    return StoredPrefix(name=prompt.name, slots=[], sequences=[], missed=[missed])


def _dropped(counts: Mapping[str, int]) -> dict[str, int]:
    """Pages that were not stored, by the reasons of `/metrics`."""
    return {reason: sum(counts.get(name, 0) for name in names) for reason, names in _REASONS.items()}
