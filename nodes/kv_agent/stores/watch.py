"""Looks after open stores: whether their files are still there, and who has to know when they are not.

Files are looked at every `LOOK_S`, by a few calls in a store's own thread. Those that are gone are opened anew, or made
anew, at once and then with growing pauses; until that succeeds nothing is found. Used by `disk.py`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, cast

from kvstore.store.place import StoreIdentity
from mesh.actor import Context

if TYPE_CHECKING:
    import asyncio

    from kvstore.store.interface import Store
    from kvstore.store.page_store import PageStore

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
    """`stores` are those that are open now; `changed` is told of one that has lost its pages, or is back."""

    def __init__(
        self,
        ctx: Context,
        stores: Callable[[], Iterable[tuple[StoreIdentity, "Store"]]],
        changed: Callable[[StoreIdentity], None],
    ) -> None:
        self._ctx = ctx
        self._stores = stores
        self._changed = changed
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
        for identity, store in self._stores():
            off, why = self._off.get(identity), store.why_off
            if why and off is None:
                self._off[identity] = _Off(why, self._ctx.now())
                self._ctx.log.warning("store is off", folder=identity.folder, why=why)
                self._changed(identity)
            elif why and off is not None and why != off.why:
                off.why = why
                self._ctx.log.warning("store is off", folder=identity.folder, why=why)
            elif off is not None and not why:
                del self._off[identity]
                self._ctx.log.info("store is on again", folder=identity.folder, pages=int(store.stats()["stored"]))
                self._changed(identity)

    def _look(self) -> None:
        self._timer = self._ctx.later(LOOK_S, self._look)
        now = self._ctx.now()
        for identity, any_store in self._stores():
            store, off = cast("PageStore", any_store), self._off.get(identity)
            if off is None:
                store.look()
            elif now >= off.again_at:
                off.pause_s = min(2 * off.pause_s, MOST_PAUSE_S)
                off.again_at = now + off.pause_s
                store.renew()
