"""Finds slots by a hash: buckets of slots in columns of numbers, since a dictionary takes 150 bytes for each page.

Used twice by `index.py`: pages by their own hash, and by their parent's. A slot is in the bucket that the first bits
of its key name, linked with the others there in both directions: all first pages have one parent, and taking one of
them out must not mean passing all the others. Keys are hashes already, so their bits are spread. Pure.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.store.checksum import Words

Slots = npt.NDArray[np.uint32]
Key = tuple[int, int]
"""A hash of 16 bytes as the two words of its column."""

NO_SLOT: Final = 2**32 - 1


class Chains:
    """The slots that were added, by `keys[slot]`; `keys` has shape (slots, 2), and is its owner's to fill."""

    def __init__(self, keys: Words) -> None:
        num_slots = len(keys)
        num_bits = max(1, (num_slots - 1).bit_length())
        self._shift = 64 - num_bits
        self._keys = keys
        self._first: Slots = np.full(1 << num_bits, NO_SLOT, np.uint32)
        self._next: Slots = np.full(num_slots, NO_SLOT, np.uint32)
        self._previous: Slots = np.full(num_slots, NO_SLOT, np.uint32)
        # The same memory for what concerns one slot: numpy takes three times as long to read one number.
        self._key_at, self._first_at = keys.data, self._first.data
        self._next_at, self._previous_at = self._next.data, self._previous.data

    @property
    def num_bytes(self) -> int:
        return self._first.nbytes + self._next.nbytes + self._previous.nbytes

    def add(self, slot: int) -> None:
        """Of slots with equal keys, the one added last is found."""
        bucket = self._key_at[slot, 0] >> self._shift
        follower = self._first_at[bucket]
        self._next_at[slot], self._previous_at[slot] = follower, NO_SLOT
        if follower != NO_SLOT:
            self._previous_at[follower] = slot
        self._first_at[bucket] = slot

    def remove(self, slot: int) -> None:
        before, after = self._previous_at[slot], self._next_at[slot]
        if before == NO_SLOT:
            self._first_at[self._key_at[slot, 0] >> self._shift] = after
        else:
            self._next_at[before] = after
        if after != NO_SLOT:
            self._previous_at[after] = before

    def all_of(self, key: Key) -> Iterator[int]:
        """Every slot with this key."""
        key_at, (first, second) = self._key_at, key
        slot = self._first_at[first >> self._shift]
        while slot != NO_SLOT:
            if key_at[slot, 0] == first and key_at[slot, 1] == second:
                yield slot
            slot = self._next_at[slot]

    def find_one(self, key: Key) -> int:
        """A slot with this key, or NO_SLOT."""
        return next(self.all_of(key), NO_SLOT)

    def add_sorted(self, slots: Slots) -> None:
        """Add many at once to empty chains: `slots`, in the order of their keys' first words."""
        if not len(slots):
            return
        buckets = self._keys[slots, 0] >> np.uint64(self._shift)
        begins = np.empty(len(slots), np.bool_)
        begins[0] = True
        np.not_equal(buckets[1:], buckets[:-1], out=begins[1:])
        self._first[buckets[begins]] = slots[begins]
        follows = np.nonzero(~begins)[0]
        self._next[slots[follows - 1]] = slots[follows]
        self._previous[slots[follows]] = slots[follows - 1]

    def find(self, keys: Words) -> Slots:
        """A slot for each of `keys`, shape (keys, 2); NO_SLOT where there is none."""
        found = self._first[keys[:, 0] >> np.uint64(self._shift)]
        waiting = np.nonzero(found != NO_SLOT)[0]
        # All buckets at once, one link further each time; they have one slot on average.
        while len(waiting):
            waiting = waiting[(self._keys[found[waiting]] != keys[waiting]).any(axis=1)]
            found[waiting] = self._next[found[waiting]]
            waiting = waiting[found[waiting] != NO_SLOT]
        return found
