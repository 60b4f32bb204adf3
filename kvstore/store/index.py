"""Which slot of a store holds which page, in what order slots are given and taken away. Pure.

A slot is free, claimed by a write, stored, or retired. Stored pages form trees by their parents' hashes. Taken away is
the page not used for longest among those that have no child (`claim` does it when it needs slots): a prefix is then
shortened from its end and stays usable, and a parent is never older than the children it had.

Slots are given so that a prefix lies in runs: a page goes behind its parent if that slot is free, else to where
several are free, so that those computed later, page by page and among those of other prefixes, find room behind it.

Everything is in columns of numbers, 86 bytes a slot with `chains.py`; objects would take five times that.
"""

import heapq
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.store.chains import NO_SLOT, Chains, Slots
from kvstore.store.checksum import Words
from kvstore.store.free_slots import FreeSlots
from kvstore.store.heads import (
    CHECKSUM_WORD,
    HASH_WORDS,
    PARENT_WORDS,
    SEQUENCE_WORD,
    are_sound,
    hash_key,
    hash_words,
)

RUN_SLOTS: Final = 8
"""Room looked for behind a page that begins a run: eight of 40 KiB are a read at which a disk is near its best."""
_MAX_RUN_SLOTS: Final = 64
"""Longer ones are not looked for: eight times the least is no faster to read, and harder to find."""
_CANDIDATES: Final = 4096
"""Oldest pages found in one pass over the columns (5 ms for 1,000,000), so that each costs a microsecond."""
_MAX_EVICTED: Final = 256
"""Pages taken at once when slots run out: neighbours become free together, and give a run."""
_EVICTED_SHARE: Final = 64
"""At most a 64th of all pages, since what is taken is missed before its slots are used again."""


class PageName(NamedTuple):
    """A page by content: its chained hash and its parent's, 16 bytes each."""

    page_hash: bytes
    parent_hash: bytes


class Claim(NamedTuple):
    """A slot for a page that is to be written; nobody finds it before it is `publish`ed."""

    slot: int
    sequence: int
    name: PageName


class StoreIndex:
    """Books of a store of `num_slots` slots; starts empty. At a start, `load` heads and then `finish_loading`."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._hashes: Words = np.zeros((num_slots, 2), np.uint64)
        self._parents: Words = np.zeros((num_slots, 2), np.uint64)
        self._sequences: Words = np.zeros(num_slots, np.uint64)
        self._checksums: Words = np.zeros(num_slots, np.uint64)
        self._used: Words = np.zeros(num_slots, np.uint64)
        self._num_children: Slots = np.zeros(num_slots, np.uint32)
        self._by_hash = Chains(self._hashes)
        # Pages whose parents are not stored: first pages, and those whose parents may yet come or were dropped.
        self._orphans = Chains(self._parents)
        # The same memory for what concerns one slot: numpy takes three times as long to read one number.
        self._hash_at, self._parent_at = self._hashes.data, self._parents.data
        self._sequence_at, self._checksum_at = self._sequences.data, self._checksums.data
        self._used_at, self._num_children_at = self._used.data, self._num_children.data
        self._free = FreeSlots(num_slots)
        self.num_stored = 0
        self.num_retired = 0
        self.num_evicted = 0
        self._gone: list[int] = []
        self._claimed: dict[bytes, Claim] = {}
        # One counter for sequences and for times of use, so that both survive a restart, the times roughly.
        self.last_sequence = 0
        """None that was ever given is above it."""
        self._candidates: list[tuple[int, int]] = []
        self._horizon = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the columns."""
        columns = (self._hashes, self._parents, self._sequences, self._checksums, self._used, self._num_children)
        chains = self._by_hash.num_bytes + self._orphans.num_bytes
        return sum(column.nbytes for column in columns) + chains + self._free.num_bytes

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_claimed(self) -> int:
        return len(self._claimed)

    def lookup(self, hashes: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Slots and sequences of the longest run of `hashes`, from the first on, that is stored; it counts as used."""
        if not hashes:
            return [], []
        found = self._by_hash.find(hash_words(hashes))
        missing = np.nonzero(found == NO_SLOT)[0]
        found = found[: missing[0]] if len(missing) else found
        self.last_sequence += 1
        self._used[found] = self.last_sequence
        return found.tolist(), self._sequences[found].tolist()

    def holds(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these pages are stored; none counts as used."""
        return (self._by_hash.find(hash_words(hashes)) != NO_SLOT).tolist()

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._claimed or self._slot_of(page_hash) != NO_SLOT

    def sequences(self, slots: Sequence[int]) -> list[int]:
        """What each slot's sequence is now, 0 if it holds nothing. Raises ValueError for a slot that there is not."""
        if slots and not 0 <= min(slots) <= max(slots) < self.num_slots:
            raise ValueError(f"slots {min(slots)} to {max(slots)} are not all in a store of {self.num_slots}")
        return self._sequences[np.asarray(slots, np.int64)].tolist()

    def checksums(self, slots: Sequence[int]) -> list[int]:
        return self._checksums[np.asarray(slots, np.int64)].tolist()

    def claim(self, names: Sequence[PageName]) -> list[Claim]:
        """Slots for those of `names` that are neither stored nor claimed, in their order; pages are evicted for it.

        None for a page that is its own parent, which would never be evicted. Fewer if all other slots are claimed,
        retired, or hold parents of what is claimed.
        """
        wanted = {name.page_hash: name for name in names if name.page_hash not in self and len(set(name)) == 2}
        claims: list[Claim] = []
        self._gone.clear()
        for number, name in enumerate(wanted.values()):
            if not self._free.num_free:
                self._evict(max(len(wanted) - number, min(_MAX_EVICTED, self.num_slots // _EVICTED_SHARE)), names)
            if not self._free.num_free:
                break
            slot = self._slot_for(name, len(wanted) - number)
            self.last_sequence += 1
            self._claimed[name.page_hash] = claim = Claim(slot, self.last_sequence, name)
            claims.append(claim)
        return claims

    def take_evicted(self) -> Words:
        """Hashes of the pages that the last `claim` has evicted, shape (pages, 2): their slots still name them."""
        return self._hashes[self._gone]

    def hash_at(self, slot: int) -> bytes:
        return self._hashes[slot].tobytes()

    def publish(self, claim: Claim, checksum: int) -> None:
        """The slot's data and head are written: from now on it is found."""
        slot, sequence, name = self._end_claim(claim)
        key, parent_key = hash_key(name.page_hash), hash_key(name.parent_hash)
        self._hash_at[slot, 0], self._hash_at[slot, 1] = key
        self._parent_at[slot, 0], self._parent_at[slot, 1] = parent_key
        self._sequence_at[slot], self._checksum_at[slot] = sequence, checksum
        self.last_sequence += 1
        self._used_at[slot] = self.last_sequence
        # Children may be here already: pages are stored in the order in which they come, and some are dropped.
        children = list(self._orphans.all_of(key))
        for child in children:
            self._orphans.remove(child)
        self._num_children_at[slot] = len(children)
        self._by_hash.add(slot)
        self._join_parent(slot)
        self.num_stored += 1

    def release(self, claim: Claim, *, reusable: bool = True) -> None:
        """Nothing was stored there. A slot that is not `reusable` cannot be written, and is not given again."""
        slot, _, _ = self._end_claim(claim)
        self._give_back(slot, reusable=reusable)

    def drop(self, slot: int, sequence: int, *, reusable: bool = True) -> bool:
        """Forget a page that cannot be read; False if the slot holds another one by now."""
        if not sequence or self._sequence_at[slot] != sequence:
            return False
        if self._num_children_at[slot]:
            children = (self._parents == self._hashes[slot]).all(axis=1) & (self._sequences > 0)
            for child in np.nonzero(children)[0].tolist():
                self._orphans.add(child)
        self._remove(slot)
        self._give_back(slot, reusable=reusable)
        return True

    def used_last(self, count: int) -> Words:
        """Hashes of up to so many stored pages, those used last, shape (pages, 2)."""
        slots = np.nonzero(self._sequences)[0]
        return self._hashes[slots[np.argsort(self._used[slots])[-count:]]]

    def used_after(self, most: int) -> int:
        """A time of use after which no more than `most` of the stored pages were used; 0 if that is all of them."""
        if self.num_stored <= most:
            return 0
        # 40 ms for 1,000,000 pages, once a list; all else of it goes in small parts.
        last = self.num_stored - most - 1
        return int(np.partition(self._used[self._sequences > 0], last)[last])

    def listed(self, first: int, num_slots: int, used_after: int) -> bytes:
        """Hashes of the pages in `num_slots` slots from `first` on that were used after that, one after the other."""
        part = slice(first, first + num_slots)
        return self._hashes[part][(self._sequences[part] > 0) & (self._used[part] > used_after)].tobytes()

    def clear(self) -> int:
        """Forget every stored page; returns how many. What is claimed stays so, and retired slots stay retired."""
        slots = np.nonzero(self._sequences)[0]
        self._sequences[:] = 0
        self._num_children[:] = 0
        # 12 bytes a slot made anew; taken out one by one, pages would have to be found by their keys.
        self._by_hash, self._orphans = Chains(self._hashes), Chains(self._parents)
        self._candidates.clear()
        self._horizon = 0
        self._free.give_back_all(slots)
        self.num_stored = 0
        return len(slots)

    # opening

    def load(self, first: int, rows: Words) -> int:
        """Take over the heads of slots `first` and following, as `decode_heads` makes them; how many are damaged."""
        sound = are_sound(rows, first)
        kept = rows * sound[:, None].astype(np.uint64)
        slots = slice(first, first + len(rows))
        self._hashes[slots], self._parents[slots] = kept[:, HASH_WORDS], kept[:, PARENT_WORDS]
        self._sequences[slots], self._checksums[slots] = kept[:, SEQUENCE_WORD], kept[:, CHECKSUM_WORD]
        return int((rows.any(axis=1) & ~sound).sum())

    def finish_loading(self, after: int = 0) -> None:
        """Link what was loaded. A page that is there twice counts once, as it was written last.

        All sequences are above `after`, so that none is of a slot whose page was another one before.
        """
        slots = np.nonzero(self._sequences)[0].astype(np.uint32)
        slots = self._without_doubles(slots[np.argsort(self._hashes[slots, 0])])
        self._by_hash.add_sorted(slots)
        self._find_parents()
        self._sequences[self._sequences > 0] += np.uint64(after)
        # The order in which they were written is all that heads tell of their use.
        self._used[:] = self._sequences
        self.last_sequence = max(after, int(self._sequences.max(initial=0)))
        self._free.mark(self._sequences > 0)
        self.num_stored = len(slots)

    def _find_parents(self) -> None:
        # Most pages lie behind their parents: comparing neighbours takes a tenth of finding each by its hash.
        is_stored = self._sequences > 0
        follows = np.zeros(self.num_slots, np.bool_)
        follows[1:] = (self._parents[1:] == self._hashes[:-1]).all(axis=1) & is_stored[1:] & is_stored[:-1]
        self._num_children[:-1] = follows[1:]
        others = np.nonzero(is_stored & ~follows)[0].astype(np.uint32)
        parents = self._by_hash.find(self._parents[others])
        np.add.at(self._num_children, parents[parents != NO_SLOT], 1)
        orphans = others[parents == NO_SLOT]
        self._orphans.add_sorted(orphans[np.argsort(self._parents[orphans, 0])])

    def _without_doubles(self, slots: Slots) -> Slots:
        """`slots` are sorted by first words. Two stored pages alike are rare, so they may cost a look each."""
        words = self._hashes[slots, 0]
        alike = np.nonzero(words[1:] == words[:-1])[0]
        if not len(alike):
            return slots
        doubtful = slots[np.union1d(alike, alike + 1)]
        newest: dict[bytes, int] = {}
        for slot in doubtful[np.argsort(self._sequences[doubtful])].tolist():
            older = newest.get(key := self._hashes[slot].tobytes())
            newest[key] = slot
            if older is not None:
                self._sequences[older] = 0
        return slots[self._sequences[slots] > 0]

    # inside

    def _slot_of(self, page_hash: bytes) -> int:
        return self._by_hash.find_one(hash_key(page_hash))

    def _end_claim(self, claim: Claim) -> Claim:
        assert self._claimed.pop(claim.name.page_hash) is claim, "a claim ends once"
        return claim

    def _give_back(self, slot: int, *, reusable: bool) -> None:
        if reusable:
            self._free.give_back(slot)
        else:
            self.num_retired += 1

    def _join_parent(self, slot: int) -> None:
        parent = self._parent_of(slot)
        if parent == NO_SLOT:
            self._orphans.add(slot)
        else:
            self._num_children_at[parent] += 1

    def _parent_of(self, slot: int) -> int:
        return self._by_hash.find_one((self._parent_at[slot, 0], self._parent_at[slot, 1]))

    def _remove(self, slot: int) -> None:
        """Its children are orphans already, or it has none."""
        parent = self._parent_of(slot)
        self._by_hash.remove(slot)
        self._sequence_at[slot] = 0
        self._num_children_at[slot] = 0
        self.num_stored -= 1
        if parent == NO_SLOT:
            self._orphans.remove(slot)
            return
        self._num_children_at[parent] -= 1
        # Who used the child has used its parent, though the child may have been written later.
        used = max(int(self._used_at[parent]), int(self._used_at[slot]))
        self._used_at[parent] = used
        if not self._num_children_at[parent] and used <= self._horizon:
            heapq.heappush(self._candidates, (used, parent))

    # slots

    def _slot_for(self, name: PageName, num_more: int) -> int:
        claimed = self._claimed.get(name.parent_hash)
        parent = claimed.slot if claimed is not None else self._slot_of(name.parent_hash)
        if self._free.take(parent + 1):
            return parent + 1
        return self._free.take_run(min(max(num_more, RUN_SLOTS), _MAX_RUN_SLOTS))

    def _evict(self, count: int, names: Sequence[PageName]) -> None:
        """Free up to `count` slots, but not those of pages in `names` or of their parents: a prefix is being stored."""
        kept = self._by_hash.find(hash_words([page_hash for name in names for page_hash in name]))
        self.last_sequence += 1
        # Used now, so that they are the last; and what is last is not taken.
        self._used[kept[kept != NO_SLOT]] = self.last_sequence
        for _ in range(count):
            slot = self._oldest()
            if slot is None or self._used_at[slot] == self.last_sequence:
                return
            self._remove(slot)
            self._give_back(slot, reusable=True)
            self._gone.append(slot)
            self.num_evicted += 1

    def _oldest(self) -> int | None:
        """The page without children that was not used for longest."""
        while True:
            while self._candidates:
                used, slot = self._candidates[0]
                # Used again, gone, or a parent by now: then it is a candidate no more, or an entry of its own.
                if self._used_at[slot] == used and self._sequence_at[slot] and not self._num_children_at[slot]:
                    return slot
                heapq.heappop(self._candidates)
            leaves = np.nonzero((self._sequences > 0) & (self._num_children == 0))[0]
            if not len(leaves):
                return None
            used_by = self._used[leaves]
            self._horizon = self.last_sequence
            if len(leaves) > _CANDIDATES:
                chosen = np.argpartition(used_by, _CANDIDATES)[:_CANDIDATES]
                leaves, used_by = leaves[chosen], used_by[chosen]
                # Those beyond are found by the next pass; a parent that is as old as these belongs among them.
                self._horizon = int(used_by.max())
            self._candidates = sorted(zip(used_by.tolist(), leaves.tolist(), strict=True))
