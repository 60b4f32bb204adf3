"""What has to happen at a peer, and is asked again until its answer comes.

An ask may be lost and its answer too, so what must happen there is asked again, with the same words, until an answer
comes, the time for it is over, or nobody wants it any more. Whatever is asked so has to be idempotent.

    add --flush--> asked --failed--> waits --retry_s over, or the peer is back--> asked again
                     `--answered, stopped, lost, too late--> forgotten

Items of one peer that gathered before a `flush` are handed over together, so one message may carry them all.
Pure; the owner's `Deadlines` tell it with `(kind, peer)` when a pause is over.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from mesh.runtime.deadlines import Deadlines

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

MAX_PENDING: Final = 65536


class _Pending(NamedTuple, Generic[Item]):
    peer: str
    item: Item
    retry_s: float
    give_up_at: float


class Retrier(Generic[Key, Item]):
    """Pending items by key, which is unique over all peers.

    Args:
        deadlines: where pauses are put, as `(kind, peer)`; when one is due `retry(peer)` has to be called.
        kind: of these keys.
        send: asks a peer for items: fresh ones, or those whose pause is over. Called by `flush` and `retry` only.
        max_pending: what is added beyond is not taken: a peer's own leases have to end it.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        kind: str,
        send: Callable[[str, list[Item]], None],
        *,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._deadlines = deadlines
        self._kind = kind
        self._send = send
        self._max_pending = max_pending
        self._pending: dict[Key, _Pending[Item]] = {}
        self._fresh: dict[str, dict[Key, None]] = {}
        self._waiting: dict[str, dict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: Key) -> bool:
        return key in self._pending

    def get(self, key: Key) -> Item | None:
        """What is pending under this key."""
        pending = self._pending.get(key)
        return None if pending is None else pending.item

    def add(self, key: Key, peer: str, item: Item, *, retry_s: float, give_up_at: float = float("inf")) -> bool:
        """Have it asked with the next `flush`, in the place of what had this key. False: there are too many.

        It is asked again `retry_s` after each failure that leaves time for that before `give_up_at`.
        """
        if len(self._pending) >= self._max_pending and key not in self._pending:
            return False
        self.stop(key)
        self._pending[key] = _Pending(peer, item, retry_s, give_up_at)
        self._fresh.setdefault(peer, {})[key] = None
        return True

    def flush(self) -> None:
        """Ask for what is fresh, each peer once."""
        if self._fresh:
            fresh, self._fresh = self._fresh, {}
            for peer, keys in fresh.items():
                self._ask(peer, keys)

    def answered(self, key: Key) -> bool:
        """An answer came; False if nobody waits for it any more."""
        return self.stop(key) is not None

    def stop(self, key: Key) -> Item | None:
        """Nobody wants the answer any more. Returns what was pending."""
        pending = self._pending.pop(key, None)
        if pending is None:
            return None
        for keys in (self._fresh.get(pending.peer), self._waiting.get(pending.peer)):
            if keys is not None:
                keys.pop(key, None)
        self._rest(pending.peer)
        return pending.item

    def failed(self, keys: Iterable[Key], now: float) -> list[Key]:
        """No answer came for these; they are asked again after a pause. Returns those that are given up."""
        late: list[Key] = []
        for key in keys:
            pending = self._pending.get(key)
            if pending is None:
                continue
            # Given up now: at the end of the pause it would be too late in any case.
            if now + pending.retry_s >= pending.give_up_at:
                self.stop(key)
                late.append(key)
                continue
            self._waiting.setdefault(pending.peer, {})[key] = None
            # The first failure's pause counts for all of this peer, so that they are asked again in one message.
            self._deadlines.set_default((self._kind, pending.peer), now + pending.retry_s)
        return late

    def keys_of(self, peer: str) -> list[Key]:
        """What is pending at a peer and has been asked."""
        fresh: Collection[Key] = self._fresh.get(peer, ())
        return [key for key, pending in self._pending.items() if pending.peer == peer and key not in fresh]

    def retry(self, peer: str) -> None:
        """The pause after a failure is over."""
        self._ask(peer, self._waiting.pop(peer, {}))

    def retry_now(self, peer: str) -> None:
        """The peer is back: do not wait for the pause to end."""
        if self._deadlines.clear((self._kind, peer)):
            self.retry(peer)

    def lost(self, peer: str) -> None:
        """The peer is gone, and what was wanted of it with it."""
        for key in [key for key, pending in self._pending.items() if pending.peer == peer]:
            self.stop(key)

    def _ask(self, peer: str, keys: Iterable[Key]) -> None:
        items = [self._pending[key].item for key in keys]
        if items:
            self._send(peer, items)

    def _rest(self, peer: str) -> None:
        if not self._waiting.get(peer, True):
            del self._waiting[peer]
            self._deadlines.clear((self._kind, peer))
