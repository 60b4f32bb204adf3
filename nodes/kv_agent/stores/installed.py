"""Makes the store that another package installs, in a thread that is not waited for without end."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvstore.errors import StoreError, StoreUnmade
from kvstore.store.installed.calls import BoundedCalls
from kvstore.store.installed.identity import context_of
from kvstore.store.installed.key import read_key
from kvstore.store.installed.plugins import InstalledStore, StoreContext, load_store
from kvstore.store.place import StoreIdentity
from nodes.kv_agent.config import InstalledStoreConfig

if TYPE_CHECKING:
    from kvstore.store.installed.installed_pages import InstalledPages

LOAD_S: Final = 30.0
"""To import its modules and to connect. Schedulers wait meanwhile; a start may take two minutes."""


async def open_installed(
    config: InstalledStoreConfig, identity: StoreIdentity, wake: Callable[[], None], load_s: float = LOAD_S
) -> "InstalledPages":
    """Raises StoreUnmade, also if it is not made after `load_s` seconds; StoreKeyUnusable."""
    key = read_key(config.key_file) if config.key_file else b""
    store = await _load(config, context_of(identity, config.deadline_s, config.options, key), load_s)
    from kvstore.store.installed.installed_pages import THREADS, InstalledPages
    from kvstore.store.installed.values import PageValues

    loop = asyncio.get_running_loop()
    calls = BoundedCalls(THREADS, config.deadline_s, time.monotonic, loop.call_later, wake)
    return InstalledPages(store, PageValues(identity, key), identity.page_bytes * identity.tp_size, calls)


async def _load(config: InstalledStoreConfig, context: StoreContext, load_s: float) -> InstalledStore:
    loop = asyncio.get_running_loop()
    made: asyncio.Future[InstalledStore] = loop.create_future()

    def settle(store: InstalledStore | None, error: StoreError | None) -> None:
        if made.done():
            if store is not None:
                # It came too late for anybody to use it; that it is closed is waited for no longer than it was.
                threading.Thread(target=store.close, name="kv-store-close", daemon=True).start()
        elif store is not None:
            made.set_result(store)
        elif error is not None:
            made.set_exception(error)

    def load() -> None:
        store, error = None, None
        try:
            store = load_store(config.name, context)
        except StoreError as problem:
            error = problem
        # Nobody waits for it any more if the loop is closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, store, error)

    # Not a thread of the loop's own pool, for the end of which the process would wait.
    threading.Thread(target=load, name="kv-store-load", daemon=True).start()
    try:
        return await asyncio.wait_for(made, load_s)
    except TimeoutError:
        raise StoreUnmade(
            f"the store {config.name} was not made within {load_s:g} s: see what it waits for, and start again"
        ) from None
