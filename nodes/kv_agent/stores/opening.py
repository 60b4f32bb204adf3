"""Opens an agent's stores of pages, each once, when schedulers have told how their workers compute.

One store for each model layout, number of ranks and numerics, shared by all groups that have pages like these. Nothing
of `kvstore/store` is imported before the first one is opened: it needs numpy, whose threads must not be in the process
that actors are forked from, nor its memory in a mesh that keeps no pages.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.errors import StoreError
from kvstore.hashing import HASH_BYTES
from kvstore.protocol import NOT_OPEN, StoreChanged
from kvstore.store.place import StoreIdentity
from mesh.actor import Context
from nodes.kv_agent.config import DiskConfig, InstalledStoreConfig, PoolConfig
from nodes.kv_agent.stores.installed import open_installed

if TYPE_CHECKING:
    from kvstore.store.interface import Store
    from kvstore.store.pool_writes import PoolWrites
    from kvstore.store.source import StoreTransport

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


class OpenStores:
    """See the module. `opened` are open, those that were opened first first.

    `groups` are the configured pools by group and rank; `opener` opens a store. `wake` is for its threads to call, and
    `then` is called with each one that was opened, before anybody else gets it.
    """

    def __init__(
        self,
        ctx: Context,
        config: StoreConfig,
        groups: Mapping[str, Sequence[PoolConfig]],
        opener: Opener,
        wake: Callable[[], None],
        then: Callable[[StoreIdentity, OpenedStore], None],
    ) -> None:
        self._ctx = ctx
        self.config = config
        self.groups = groups
        self._opener = opener
        self._wake = wake
        self._then = then
        self.opened: dict[StoreIdentity, OpenedStore] = {}
        self._opening: dict[StoreIdentity, asyncio.Task[OpenedStore | StoreError]] = {}
        self._failed_at: dict[StoreIdentity, float] = {}
        # Pages that came before their store was open, which knows why they are missing from then on.
        self._unopened: dict[StoreIdentity, deque[bytes]] = {}
        self.askers: dict[str, str] = {}
        """By group, the scheduler that asks for its pages."""

    @property
    def is_opening(self) -> bool:
        return bool(self._opening)

    def identity(self, group: str, numerics: str) -> StoreIdentity:
        layout = self.groups[group][0].layout
        return StoreIdentity(
            host=self.config.host,
            layout_digest=layout.digest,
            page_bytes=layout.page_bytes,
            tp_size=layout.tp_size,
            numerics=numerics,
        )

    def groups_of(self, identity: StoreIdentity) -> list[str]:
        """Those whose pages it has."""
        return [group for group in self.groups if self.identity(group, identity.numerics) == identity]

    def get(self, identity: StoreIdentity) -> OpenedStore | None:
        """The store if it is open. If not, this agent has just replaced another one, and opens it again.

        What is there will be found by those that come later.
        """
        if identity in self.opened:
            return self.opened[identity]
        # What is wrong now was not when the scheduler started.
        has_just_failed = self._ctx.now() < self._failed_at.get(identity, -math.inf) + AGAIN_S
        if not has_just_failed and identity not in self._opening:
            self._ctx.spawn(self.open(identity), name="open store again")
        return None

    def missed(self, identity: StoreIdentity, hashes: Iterable[bytes]) -> None:
        """Pages came before it was open."""
        self._unopened.setdefault(identity, deque(maxlen=_UNOPENED)).extend(hashes)

    async def open(self, identity: StoreIdentity) -> OpenedStore | StoreError:
        """The store, opened once however many ask for it; or why it cannot be."""
        if identity in self.opened:
            return self.opened[identity]
        if identity not in self._opening:
            self._opening[identity] = self._ctx.spawn(self._open_one(identity), name="open store")
        # Several may wait for it, and one of them may be cancelled.
        return await asyncio.shield(self._opening[identity])

    def tell_changed(self, identity: StoreIdentity) -> None:
        """Have its schedulers look again for what it has."""
        for group in self.groups_of(identity):
            if group in self.askers:
                self._ctx.tell(self.askers[group], StoreChanged(group=group))

    async def _open_one(self, identity: StoreIdentity) -> OpenedStore | StoreError:
        log = self._ctx.log
        try:
            opened = await self._opener(self.config, identity, self._wake)
        except StoreError as error:
            self._failed_at[identity] = self._ctx.now()
            log.warning("store refused", code=error.code, why=error.message, numerics=identity.numerics)
            return error
        finally:
            del self._opening[identity]
            self._wake()
        self._failed_at.pop(identity, None)
        self.opened[identity] = opened
        unopened = self._unopened.pop(identity, ())
        opened.store.missing.add_hashes([one for one in unopened if len(one) == HASH_BYTES], NOT_OPEN)
        self._then(identity, opened)
        pages, folder = opened.store.num_slots, identity.folder
        log.info("store", place=self.config.place, folder=folder, pages=pages, numerics=identity.numerics)
        return opened
