"""Numbers for the pages of a store that names them by hashes alone.

Transfers name pages by numbers and compare generations. So each page that an installed store is known to have gets a
slot and a sequence, which mean something to this process only; the one not used for longest loses its slot. Pure.
"""

from collections import OrderedDict
from collections.abc import Sequence


class KnownPages:
    """At most `num_slots` pages. A sequence is never used twice, so a slot that was given away is noticed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # By hash, least recently used first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        # By slot; as long as slots were given so far.
        self._hashes: list[bytes] = []
        self._sequences: list[int] = []
        self._free: list[int] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._slots

    def number(self, page_hash: bytes) -> tuple[int, int]:
        """The page's slot and sequence, given now if it has none; it counts as used."""
        slot = self._slots.get(page_hash)
        if slot is not None:
            self._slots.move_to_end(page_hash)
            return slot, self._sequences[slot]
        slot = self._slots[page_hash] = self._next_slot()
        self._last += 1
        self._hashes[slot], self._sequences[slot] = page_hash, self._last
        return slot, self._last

    def drop(self, page_hash: bytes) -> None:
        """It is not there after all."""
        slot = self._slots.pop(page_hash, None)
        if slot is not None:
            # A copy that is under way compares it afterwards, and sees that the page is gone.
            self._sequences[slot] = 0
            self._free.append(slot)

    def sequences(self, slots: Sequence[int]) -> list[int]:
        """What each slot's sequence is now, 0 if it holds nothing. Raises ValueError for a slot that there is not."""
        if slots and not 0 <= min(slots) <= max(slots) < self.num_slots:
            raise ValueError(f"slots {min(slots)} to {max(slots)} are not all among {self.num_slots}")
        return [self._sequences[slot] if slot < len(self._sequences) else 0 for slot in slots]

    def hash_at(self, slot: int) -> bytes:
        """The page that this slot holds."""
        return self._hashes[slot]

    def _next_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self._hashes) < self.num_slots:
            self._hashes.append(b"")
            self._sequences.append(0)
            return len(self._hashes) - 1
        # The store may still have it: then it is asked for, and numbered, again.
        _, slot = self._slots.popitem(last=False)
        return slot
