"""Things that must happen at a peer, asked for repeatedly until the peer answers.

Asks and answers may be lost, so each is repeated unchanged until an answer comes, its time is over, or it is no longer
wanted. Everything asked for in this way has to be idempotent.

    add --flush--> asked --failed--> waits --retry_s over, or the peer is back--> asked again
                  ^  `--answered, stopped, lost, too late--> forgotten
    add, patient -` once others are asked for, its patience is over, or somebody is in a hurry

Items for one peer that gather before a `flush` are handed over together, so that one message may carry them all. Pure;
the owner's `Deadlines` have a `(kind, peer)` key due when a pause, or the patience of an item, is over.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from mesh.runtime.deadlines import Deadlines

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

MAX_PENDING: Final = 65536
"""Some 20 MB at 300 bytes each. A gateway holds 2,048 requests and a scheduler 1,024 orders: only a leak gets here."""


class _Pending(NamedTuple, Generic[Item]):
    peer: str
    item: Item
    retry_s: float
    give_up_at: float


class Retrier(Generic[Key, Item]):
    """Pending items by key; keys are unique across all peers.

    `deadlines` holds the pauses as `(kind, peer)`; when one is due, the owner must call `retry(peer)`. `send` asks a
    peer for fresh items, or those whose pause is over, only within `flush`, `hurry`, `retry` and `retry_now`. Beyond
    `max_pending`, items are not accepted; the peer's own leases have to end what was to be ended.
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
        # Peers of which an ask failed, until their pause is over: what is patient then waits as the others do.
        self._resting: set[str] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: Key) -> bool:
        return key in self._pending

    def get(self, key: Key) -> Item | None:
        pending = self._pending.get(key)
        return None if pending is None else pending.item

    def add(
        self,
        key: Key,
        peer: str,
        item: Item,
        *,
        retry_s: float,
        give_up_at: float = float("inf"),
        patient_until: float | None = None,
    ) -> bool:
        """Replaces the key's item; asked again `retry_s` after a failure until `give_up_at`. False: too many.

        With `patient_until` it is first asked then, or before together with others.
        """
        if len(self._pending) >= self._max_pending and key not in self._pending:
            return False
        self.stop(key)
        self._pending[key] = _Pending(peer, item, retry_s, give_up_at)
        if patient_until is None:
            self._fresh.setdefault(peer, {})[key] = None
        else:
            self._waiting.setdefault(peer, {})[key] = None
            self._deadlines.set_default((self._kind, peer), patient_until)
        return True

    def flush(self) -> None:
        if self._fresh:
            fresh, self._fresh = self._fresh, {}
            for peer, keys in fresh.items():
                # A peer that rests has just failed to answer: what is new to it is tried, what waits has its pause.
                company = {} if peer in self._resting else self._waiting.pop(peer, {})
                if company:
                    self._deadlines.clear((self._kind, peer))
                self._ask(peer, keys | company)

    def answered(self, key: Key) -> bool:
        return self.stop(key) is not None

    def stop(self, key: Key) -> Item | None:
        pending = self._pending.pop(key, None)
        if pending is None:
            return None
        for keys in (self._fresh.get(pending.peer), self._waiting.get(pending.peer)):
            if keys is not None:
                keys.pop(key, None)
        self._rest(pending.peer)
        return pending.item

    def failed(self, keys: Iterable[Key], now: float) -> list[Key]:
        """No answer came for these; they are asked for again after a pause. Returns those that are given up."""
        late: list[Key] = []
        for key in keys:
            pending = self._pending.get(key)
            if pending is None:
                continue
            # Given up now, as it would be too late at the end of the pause anyway.
            if now + pending.retry_s >= pending.give_up_at:
                self.stop(key)
                late.append(key)
                continue
            self._waiting.setdefault(pending.peer, {})[key] = None
            # The pause of the first failure holds for all items of this peer, so that one message can repeat them all.
            if pending.peer not in self._resting:
                self._resting.add(pending.peer)
                self._deadlines.set((self._kind, pending.peer), now + pending.retry_s)
        return late

    def keys_of(self, peer: str) -> list[Key]:
        fresh: Collection[Key] = self._fresh.get(peer, ())
        return [key for key, pending in self._pending.items() if pending.peer == peer and key not in fresh]

    def retry(self, peer: str) -> None:
        self._resting.discard(peer)
        self._ask(peer, self._waiting.pop(peer, {}))

    def retry_now(self, peer: str) -> None:
        if self._deadlines.clear((self._kind, peer)):
            self.retry(peer)

    def hurry(self) -> None:
        """Ask for all that is patient now. What rests has its pause: its peer has just failed to answer."""
        for peer in [peer for peer in self._waiting if peer not in self._resting]:
            self.retry_now(peer)

    def lost(self, peer: str) -> None:
        for key in [key for key, pending in self._pending.items() if pending.peer == peer]:
            self.stop(key)

    def _ask(self, peer: str, keys: Iterable[Key]) -> None:
        items = [self._pending[key].item for key in keys]
        if items:
            self._send(peer, items)

    def _rest(self, peer: str) -> None:
        if not self._waiting.get(peer, True):
            del self._waiting[peer]
            self._resting.discard(peer)
            self._deadlines.clear((self._kind, peer))
