"""Calls that wait for an answer: each is settled exactly once, by its deadline at the latest. Pure.

`CallTable` is the bookkeeping, `PendingCalls` the asker's use of it; the answering side's is `mesh/calls/mailbox.py`.
Deadlines are on the loop's clock. Whoever owns a table arms one timer for `next_deadline()`.
"""

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from mesh.address import Address
from mesh.errors import MailboxFull

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_SLACK: Final = 64


class CallTable(Generic[Key, Value]):
    """A bounded set of calls by key, with their peers and deadlines.

    The heap holds stale entries of settled calls until they come up or outnumber the live ones, so settling is O(1).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Peer, deadline, value: a plain tuple, since one is made for every call.
        self._entries: dict[Key, tuple[Address, float, Value]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._opened = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether one more call is too many."""
        return len(self._entries) >= self.capacity

    def add(self, key: Key, peer: Address, deadline: float, value: Value) -> None:
        """Take a call in; only while there is room, and only a new key."""
        entries, heap = self._entries, self._heap
        assert key not in entries, "a call was taken twice"
        assert len(entries) < self.capacity, "a call was taken beyond the table's capacity"
        self._opened += 1
        entries[key] = (peer, deadline, value)
        heapq.heappush(heap, (deadline, self._opened, key))
        if len(heap) > 2 * len(entries) + _SLACK:
            self._compact()

    def peer_of(self, key: Key) -> Address | None:
        """With whom a call is; None if it is settled or was never there."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: Key) -> Value | None:
        """The value of a call that is not settled."""
        entry = self._entries.get(key)
        return None if entry is None else entry[2]

    def settle(self, key: Key) -> Value | None:
        """Take a call out; None if that has happened already."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[2]

    def lose(self, peer: Address) -> list[Value]:
        """Take out all calls with a peer that is gone, oldest first."""
        keys = [key for key, entry in self._entries.items() if entry[0] == peer]
        return [self._entries.pop(key)[2] for key in keys]

    def expire(self, now: float) -> list[tuple[Key, Address, Value]]:
        """Take out all calls whose deadline has come, in order of deadlines: key, peer and value."""
        expired: list[tuple[Key, Address, Value]] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            deadline, _, key = heapq.heappop(heap)
            entry = self._entries.get(key)
            if entry is not None and entry[1] == deadline:
                del self._entries[key]
                expired.append((key, entry[0], entry[2]))
        return expired

    def close(self) -> list[Value]:
        """Take everything out, oldest first."""
        values = [value for _, _, value in self._entries.values()]
        self._entries.clear()
        self._heap.clear()
        return values

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next, or earlier; None if there is no call."""
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
        """Take a call in; raises `MailboxFull`."""
        if len(self._entries) >= self.capacity:
            raise MailboxFull(f"{self.capacity} calls are in flight already; wait for some of them to end")
        self.add(message_id, peer, deadline, value)

    def answered(self, message_id: int, sender: Address) -> Value | None:
        """Take out the call that `sender` answers; None if there is none, or if it was asked of somebody else."""
        entry = self._entries.get(message_id)
        if entry is None or entry[0] != sender:
            return None
        del self._entries[message_id]
        return entry[2]

    def waiting(self, message_id: int, sender: Address) -> Value | None:
        """The call that `sender` answers, left in; None as in `answered`."""
        entry = self._entries.get(message_id)
        return entry[2] if entry is not None and entry[0] == sender else None
