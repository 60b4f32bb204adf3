"""Looks after open stores: whether their files are still there, and who has to know when they are not.

Files are looked at every `LOOK_S`, by a few calls in a store's own thread. Those that are gone are opened anew, or made
anew, at once and then with growing pauses; until that succeeds nothing is found. Used by `traffic.py`.
"""

from typing import TYPE_CHECKING, Final, cast

from mesh.actor import Context
from nodes.kv_agent.stores.opening import OpenStores

if TYPE_CHECKING:
    import asyncio

    from kvstore.store.page_store import PageStore
    from kvstore.store.place import StoreIdentity

LOOK_S: Final = 5.0
"""What is stored after the files are gone is stored in vain for so long; a look takes 0.1 ms."""
MOST_PAUSE_S: Final = 80.0
"""Reserving a store's space may take a disk minutes, in vain if it is still full."""


class _Off:
    """A store of which nothing is found."""

    def __init__(self, why: str, now: float) -> None:
        self.why = why
        self.pause_s = LOOK_S
        self.again_at = now + LOOK_S


class StoreWatch:
    """Schedulers are told of one of `stores` that has lost its pages, or is back."""

    def __init__(self, ctx: Context, stores: OpenStores) -> None:
        self._ctx = ctx
        self._stores = stores
        self._off: dict[StoreIdentity, _Off] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Look from now on. Only for stores on disk; of another one, it says itself when it is off."""
        if self._timer is None:
            self._timer = self._ctx.later(LOOK_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def tell(self) -> None:
        """Say which stores went off or came back since the last call."""
        for identity, (store, _, _) in self._stores.opened.items():
            off, why = self._off.get(identity), store.why_off
            if why and (off is None or why != off.why):
                self._ctx.log.warning("store is off", folder=identity.folder, why=why)
            if why and off is None:
                self._off[identity] = _Off(why, self._ctx.now())
                self._stores.tell_changed(identity)
            elif why and off is not None:
                off.why = why
            elif off is not None:
                del self._off[identity]
                self._ctx.log.info("store is on again", folder=identity.folder, pages=int(store.stats()["stored"]))
                self._stores.tell_changed(identity)

    def _look(self) -> None:
        self._timer = self._ctx.later(LOOK_S, self._look)
        now = self._ctx.now()
        for identity, (any_store, _, _) in self._stores.opened.items():
            store, off = cast("PageStore", any_store), self._off.get(identity)
            if off is None:
                store.look()
            elif now >= off.again_at:
                off.pause_s = min(2 * off.pause_s, MOST_PAUSE_S)
                off.again_at = now + off.pause_s
                store.renew()
