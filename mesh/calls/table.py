"""Unanswered calls, on either side: each is settled exactly once, at its deadline at the latest. Pure.

`PendingCalls` holds the calls that an actor has made, `Mailbox` those that it has accepted. A call beyond the mailbox's
limits is answered `overloaded` at once, so a slow actor slows its askers instead of growing. Deadlines are on the
loop's clock.
"""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from mesh.address import Address
from mesh.errors import MailboxFull

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_SLACK: Final = 64
"""So that a table with few calls does not rebuild its heap at each of them; 64 stale entries are 6 KB."""
_REMEMBERED: Final = 256
"""Only calls behind bulk on the data channel are overtaken; if one is forgotten, its call is answered for nobody."""


class CallTable(Generic[Key, Value]):
    """A bounded set of calls by key, with their peers and deadlines.

    Entries of settled calls stay in the heap until they surface or outnumber the live ones, so settling is O(1).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Peer, deadline, value; a plain tuple, because one is made for every call.
        self._entries: dict[Key, tuple[Address, float, Value]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._opened = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self.capacity

    def add(self, key: Key, peer: Address, deadline: float, value: Value) -> None:
        """Add a call; there must be room, and the key must be new."""
        entries, heap = self._entries, self._heap
        assert key not in entries, "a call was added twice"
        assert len(entries) < self.capacity, "a call was added beyond the table's capacity"
        self._opened += 1
        entries[key] = (peer, deadline, value)
        heapq.heappush(heap, (deadline, self._opened, key))
        if len(heap) > 2 * len(entries) + _SLACK:
            self._compact()

    def peer_of(self, key: Key) -> Address | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[2]

    def settle(self, key: Key) -> Value | None:
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[2]

    def lose(self, peer: Address) -> list[Value]:
        keys = [key for key, entry in self._entries.items() if entry[0] == peer]
        return [self._entries.pop(key)[2] for key in keys]

    def expire(self, now: float) -> list[tuple[Key, Address, Value]]:
        """Remove all calls whose deadline has come, in order of deadlines; returns key, peer and value of each."""
        expired: list[tuple[Key, Address, Value]] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            deadline, _, key = heapq.heappop(heap)
            entry = self._entries.get(key)
            # Compare deadlines too: a key that was settled and added again still has its old entry in the heap.
            if entry is not None and entry[1] == deadline:
                del self._entries[key]
                expired.append((key, entry[0], entry[2]))
        return expired

    def close(self) -> list[Value]:
        values = [value for _, _, value in self._entries.values()]
        self._entries.clear()
        self._heap.clear()
        return values

    def next_deadline(self) -> float | None:
        """The time at which `expire` next has something to do, or an earlier one; None if there is no call."""
        if not self._entries:
            self._heap.clear()
            return None
        heap = self._heap
        while heap[0][2] not in self._entries:
            heapq.heappop(heap)
        return heap[0][0]

    def _compact(self) -> None:
        self._heap = [item for item in self._heap if item[2] in self._entries]
        heapq.heapify(self._heap)


class PendingCalls(CallTable[int, Value]):
    """The asker's side: calls by message id."""

    def open(self, message_id: int, peer: Address, deadline: float, value: Value) -> None:
        if len(self._entries) >= self.capacity:
            raise MailboxFull(f"{self.capacity} calls are already in flight; wait for some of them to end")
        self.add(message_id, peer, deadline, value)

    def answered(self, message_id: int, sender: Address) -> Value | None:
        """Remove the call that `sender` answers; None if there is none, or if another actor was asked."""
        entry = self._entries.get(message_id)
        # Message ids are small numbers, so another peer could guess one and answer in place of the one asked.
        if entry is None or entry[0] != sender:
            return None
        del self._entries[message_id]
        return entry[2]


MailKey = tuple[Address, int]
"""The asker's address, and the message id of the call."""


class Admission(enum.Enum):
    """What becomes of an arriving call."""

    TAKEN = enum.auto()
    REPEATED = enum.auto()
    CANCELLED = enum.auto()
    OVERLOADED = enum.auto()


class Mailbox(CallTable[MailKey, Value]):
    """Calls by (sender, message id)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.per_sender = max(1, capacity - capacity // 2)
        self._counts: dict[Address, int] = {}
        self._cancelled: OrderedDict[MailKey, None] = OrderedDict()

    def admit(self, sender: Address, message_id: int, deadline: float, value: Value) -> Admission:
        key = (sender, message_id)
        if key in self._entries:
            return Admission.REPEATED
        # Test for an empty dictionary first: hardly any call is cancelled before it arrives.
        if self._cancelled and self._cancelled.pop(key, self) is None:
            return Admission.CANCELLED
        count = self._counts.get(sender, 0)
        # At most half for one sender: a flooding peer must not shut out all others.
        if self.is_full or count >= self.per_sender:
            return Admission.OVERLOADED
        self.add(key, sender, deadline, value)
        self._counts[sender] = count + 1
        return Admission.TAKEN

    def cancel(self, key: MailKey) -> Value | None:
        """Remove a call, or remember its key for a while: `cancel` may overtake a call that is behind bulk."""
        value = self.settle(key)
        if value is None:
            self._cancelled[key] = None
            if len(self._cancelled) > _REMEMBERED:
                self._cancelled.popitem(last=False)
        return value

    def settle(self, key: MailKey) -> Value | None:
        value = super().settle(key)
        if value is not None:
            self._release(key[0])
        return value

    def lose(self, peer: Address) -> list[Value]:
        self._counts.pop(peer, None)
        return super().lose(peer)

    def expire(self, now: float) -> list[tuple[MailKey, Address, Value]]:
        expired = super().expire(now)
        for _, sender, _ in expired:
            self._release(sender)
        return expired

    def close(self) -> list[Value]:
        self._counts.clear()
        return super().close()

    def _release(self, sender: Address) -> None:
        left = self._counts[sender] - 1
        if left:
            self._counts[sender] = left
        else:
            del self._counts[sender]
