"""Which slots are free, and where several are beside each other. Pure."""

from typing import Final

import numpy as np

_TAKEN: Final = b"\0"
_FREE: Final = b"\1"


class FreeSlots:
    """All slots are free at first. A byte each, and a list of runs that is made anew when it is used up."""

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._is_free = bytearray(_FREE * num_slots)
        # (length, start), the longest last. Notes, not truth: slots of theirs may be taken, or others free.
        self._runs: list[tuple[int, int]] = [(num_slots, 0)]

    @property
    def num_bytes(self) -> int:
        return len(self._is_free)

    def mark(self, is_stored: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
        """Take exactly the slots for which this is true, shape (slots,)."""
        self._is_free[:] = (~is_stored).tobytes()
        self.num_free = len(is_stored) - int(is_stored.sum())
        self._runs.clear()

    def take(self, slot: int) -> bool:
        """Whether this slot was free; it no longer is. False for one that there is not."""
        if slot >= len(self._is_free) or not self._is_free[slot]:
            return False
        self._is_free[slot] = 0
        self.num_free -= 1
        return True

    def take_run(self, length: int) -> int:
        """Take the first slot of a run; the `length` - 1 after it are not offered to others while there is more room.

        `num_free` is above 0. A run is shorter if none is as long.
        """
        while True:
            if not self._runs:
                self._list_runs()
            found, start = self._runs.pop()
            if not self._is_free[start]:
                # Whoever wrote before it went on into it, and may be in it still: its rest is listed next time.
                continue
            end = self._is_free.find(_TAKEN, start, start + found)
            left = (found if end < 0 else end - start) - length
            if left > 0:
                self._runs.append((left, start + length))
            self.take(start)
            return start

    def give_back(self, slot: int) -> None:
        self._is_free[slot] = 1
        self.num_free += 1

    def give_back_all(self, slots: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        """Free slots that are taken, at once: one by one a million of them would take a tenth of a second."""
        np.frombuffer(self._is_free, np.uint8)[slots] = 1
        self.num_free += len(slots)

    def _list_runs(self) -> None:
        free = np.nonzero(np.frombuffer(self._is_free, np.bool_))[0]
        begins = np.nonzero(np.diff(free, prepend=-2) != 1)[0]
        lengths = np.diff(begins, append=len(free))
        self._runs = sorted(zip(lengths.tolist(), free[begins].tolist(), strict=True))
