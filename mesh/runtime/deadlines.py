"""All the deadlines of a core in one place, so that its actor needs only one timer (`timers.DeadlineTimer`).

Keys are `(kind, id)`; setting a key again moves it. Pure; owned by the core, which dispatches what is due by kind.
"""

import heapq

Key = tuple[str, str]


class Deadlines:
    """A priority queue of keys. Moved and cleared entries are dropped when they surface."""

    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: Key, at: float) -> None:
        self._at[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def set_default(self, key: Key, at: float) -> None:
        if key not in self._at:
            self.set(key, at)

    def clear(self, key: Key) -> bool:
        return self._at.pop(key, None) is not None

    def at(self, key: Key) -> float | None:
        return self._at.get(key)

    def next(self) -> float | None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Key | None:
        """Remove and return the earliest due key. One at a time: handling it may move or clear the others."""
        at = self.next()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key
