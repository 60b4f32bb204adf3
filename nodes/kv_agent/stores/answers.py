"""What an agent answers about its stores: to schedulers what is there of their prompts, to operators what is kept.

An installed store may take longer to say what is in it than a disk.
"""

from collections import Counter
from typing import TYPE_CHECKING, Final, cast

import msgspec

from kvstore.errors import StoreError
from kvstore.hashing import HASH_BYTES, split_hashes
from kvstore.protocol import (
    NOT_OPEN,
    FindStored,
    ListStoredPages,
    MissedPages,
    OpenStore,
    StoredFound,
    StoredPagesListed,
    StoredPrefix,
    StoredPrompt,
    StoreOpened,
)
from kvstore.store.place import StoreFound, StoreIdentity
from mesh.actor import Call, Context
from nodes.kv_agent.config import DiskConfig, InstalledStoreConfig
from nodes.kv_agent.stores.facts import dropped, facts_of_open, figures_of, look_into, with_others
from nodes.kv_agent.stores.misses import misses
from nodes.kv_agent.stores.opening import OpenedStore
from nodes.kv_agent.stores.traffic import StoreTraffic
from nodes.protocol.stores import (
    LOADING,
    AgentStores,
    FlushedStore,
    FlushStores,
    ListStores,
    StoreFacts,
    StoreList,
    StoresFlushed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.store.interface import Stored
    from kvstore.store.page_store import PageStore

STORE_ASKS: Final = (OpenStore, FindStored, ListStoredPages, ListStores, FlushStores)


def answer_without_stores(ctx: Context, call: Call) -> None:
    """Answer one of `STORE_ASKS` where nothing is kept."""
    if isinstance(call.message, ListStores):
        # An operator asks all agents, whatever each is set to.
        call.reply(StoreList(agents=[]))
    elif isinstance(call.message, FlushStores):
        call.reply(StoresFlushed(flushed=[]))
    else:
        call.fail("no_store", f"{ctx.address.actor_id} is set to keep no pages on disk")


class StoreAnswers:
    """Answers one agent's `STORE_ASKS`."""

    def __init__(self, ctx: Context, traffic: StoreTraffic) -> None:
        self._ctx = ctx
        self._traffic = traffic
        self._stores = traffic.stores
        self._found_at: dict[StoreIdentity, float] = {}

    def on_ask(self, call: Call) -> None:
        match call.message:
            case ListStores():
                self._ctx.spawn(self._list(call), name="list stores")
            case FlushStores() as message:
                self._on_flush(call, message)
            case OpenStore() | FindStored() | ListStoredPages() as message:
                if message.group not in self._stores.groups:
                    agent = self._ctx.address.actor_id
                    call.fail("unknown_group", f"{agent} has no pool of group {message.group!r}")
                    return
                self._stores.askers[message.group] = call.sender.actor_id
                identity = self._stores.identity(message.group, message.numerics)
                if isinstance(message, OpenStore):
                    self._ctx.spawn(self._open(call, message, identity), name=f"open store of {message.group}")
                elif isinstance(message, FindStored):
                    self.on_find(call, message, identity)
                else:
                    self._on_list_pages(call, message, identity)
            case _:
                raise AssertionError("the actor passes only `STORE_ASKS` on")

    def on_find(self, call: Call, message: FindStored, identity: StoreIdentity) -> None:
        """Answer what is there: what is not known to be is a miss. A disk is known at once."""
        opened = self._stores.get(identity)
        if opened is None:
            call.reply(StoredFound(found=[_unopened(prompt) for prompt in message.prompts]))
            return
        alike = msgspec.structs.replace(identity, numerics="")
        others = [
            other.store
            for theirs, other in self._stores.opened.items()
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
                self._found_at[identity] = self._ctx.now()
            call.reply(StoredFound(found=found, source=identity.folder, incarnation=self._ctx.address.epoch))

        opened.store.find(wanted, answer)

    def gauges(self) -> dict[str, float]:
        """Figures of all stores together; those whose names end in `_total` begin at 0 with this agent."""
        opened = self._stores.opened.values()
        return figures_of(opened, self._sums(), is_installed=isinstance(self._stores.config, InstalledStoreConfig))

    # inside

    def _sums(self) -> Counter[str]:
        """What was counted here and in all stores, as the parts name it."""
        counts = Counter(self._traffic.counts)
        for store, writes, _ in self._stores.opened.values():
            for name, number in (*store.stats().items(), *writes.counts.items()):
                counts[name] += int(number)
        return counts

    async def _open(self, call: Call, message: OpenStore, identity: StoreIdentity) -> None:
        opened = await self._stores.open(identity)
        if isinstance(opened, StoreError):
            call.fail(opened.code, opened.message)
        else:
            call.reply(StoreOpened(group=message.group, num_pages=opened.store.num_slots))

    def _on_list_pages(self, call: Call, message: ListStoredPages, identity: StoreIdentity) -> None:
        """Answer with a part of what is there, of which the asker tells those who route."""
        opened = self._stores.get(identity)
        if opened is None:
            call.fail("store_not_open", f"the store of {message.group} is not open", retryable=True)
        elif not opened.store.is_loaded:
            call.fail(LOADING, f"what the store of {message.group} has is still being read", retryable=True)
        else:
            hashes, next_slot, used_after = opened.store.listed(message.first_slot, message.used_after)
            call.reply(StoredPagesListed(hashes=hashes, next_slot=next_slot, used_after=used_after))

    async def _list(self, call: Call) -> None:
        config = self._stores.config
        is_disk = isinstance(config, DiskConfig)
        directory, size_bytes = (config.directory, config.size_bytes) if is_disk else (config.name, 0)
        found: Sequence[StoreFound] = await look_into(directory) if is_disk else ()
        now = self._ctx.now()
        opened: list[StoreFacts] = []
        for identity, (store, writes, _) in self._stores.opened.items():
            at = self._found_at.get(identity)
            idle_s = None if at is None else now - at
            groups = self._stores.groups_of(identity)
            opened.append(facts_of_open(identity, store, writes.num_queued, groups, idle_s))
        kept = AgentStores(
            agent=self._ctx.address.actor_id,
            directory=config.place,
            size_bytes=size_bytes,
            stores=with_others(opened, found),
            dropped=dropped(self._sums()),
        )
        call.reply(StoreList(agents=[kept]))

    def _on_flush(self, call: Call, message: FlushStores) -> None:
        if isinstance(self._stores.config, InstalledStoreConfig):
            # It forgets pages by their names, and who knows what others have put there.
            why = f"{self._stores.config.place} keeps what it has until it is emptied by its own means"
            call.fail("store_not_flushed", why)
            return
        meant = {
            identity: opened
            for identity, opened in self._stores.opened.items()
            if not message.folders or identity.folder in message.folders
        }
        loading = [identity.folder for identity, opened in meant.items() if not opened.store.is_loaded]
        if loading:
            what = f"what {', '.join(loading)} has is still being read, or the store is off: `meshctl kv stats`"
            call.fail(LOADING, what, retryable=True)
            return
        self._ctx.spawn(self._flush(call, meant), name="flush stores")

    async def _flush(self, call: Call, meant: dict[StoreIdentity, OpenedStore]) -> None:
        agent = self._ctx.address.actor_id
        flushed: list[FlushedStore] = []
        # Installed ones are refused before.
        stores = {identity: cast("PageStore", opened.store) for identity, opened in meant.items()}
        for identity, store in stores.items():
            meant[identity].writes.forget()
            flushed.append(FlushedStore(agent=agent, folder=identity.folder, num_pages=store.flush()))
        self._traffic.poll_soon()
        await self._traffic.until(lambda: not any(store.num_flushing for store in stores.values()))
        self._ctx.log.info("stores flushed", pages={one.folder: one.num_pages for one in flushed})
        for identity in stores:
            self._stores.tell_changed(identity)
        failures = [f"{identity.folder}: {store.why_not_flushed}" for identity, store in stores.items()
                    if store.why_not_flushed]  # fmt: skip
        if failures:
            told = "; ".join(failures)
            call.fail("store_not_flushed", f"pages are forgotten until {agent} starts again, but its disk says {told}")
        else:
            call.reply(StoresFlushed(flushed=flushed))


def _unopened(prompt: StoredPrompt) -> StoredPrefix:
    missed = MissedPages(why=NOT_OPEN, num=len(prompt.hashes) // HASH_BYTES)
    return StoredPrefix(name=prompt.name, slots=[], sequences=[], missed=[missed])
