"""What every page of a pool holds, in the pool's own shared memory, so that it outlives the process that wrote it.

One scheduler writes; agents read, and so does the next scheduler after a crash. Each page has two slots, which are
written in turn: the entry with sequence `n` goes to slot `n & 1`. A write takes four steps: it sets the mark, writes
the rest, writes the sequence, and clears the mark. A slot counts if it has a sequence, no mark and the right CRC, so a
writer that stops at any byte, whatever the order of stores inside one of the four steps, leaves the old entry or the
new one. Without the mark, a successor's interrupted write could complete what its predecessor had begun. No locks: a
reader copies both slots and takes the newest that counts.

Memory damaged from outside is not mistaken for a writer that stopped: if a slot neither counts nor has its mark, the
page is known to be torn, even if the other slot is whole: with the newer entry lost, the older one may name tokens
that the page no longer holds.

One slot, little-endian, `64 + 4 * page_size` bytes:

    offset  bytes  field
    0       6      sequence; 0 in a slot never written (all its bytes are 0)
    6       2      mark while the slot is being written (`_MARK`), else 0
    8       4      CRC-32 of what follows, seeded with page number and sequence (`_crc_start`)
    12      1      state (`PageState`)
    13      1      flags: 1 first page of its chain, 2 private (never shared, whatever it holds)
    14      2      fill: tokens whose KV is written
    16      8      generation: the allocation that the page belongs to; unique in the pool, ever rising, below 2**63
    24      8      owner epoch: the scheduler incarnation that wrote it
    32      16     chained hash, zero until the page is full
    48      16     parent's hash, zero while unknown
    64      4 * page_size   token ids, zero past fill
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import msgspec

from kvstore.cache.allocator import PageState
from kvstore.cache.memory_order import STORES_ARE_ORDERED, fence
from kvstore.hashing import HASH_BYTES, NO_HASH, TOKEN_BYTES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Slots = npt.NDArray[np.void]

HEADER_BYTES: Final = 64
"""A cache line, and so the token ids begin on one; the fields of the table above fill it."""
HASH_OFFSET: Final = 32
FLAG_FIRST: Final = 1
FLAG_PRIVATE: Final = 2

_HEADER: Final = struct.Struct("<QIBBHQQ16s16s")
_SEQUENCE: Final = struct.Struct("<Q")
_CHECKED: Final = struct.Struct("<QIBBHQ")
_MARK_OFFSET: Final = 6
_MARK_END: Final = 8
_MARK_BITS: Final = 48
_MARK: Final = b"\xa5\xc3"
_MARK_NUMBER: Final = int.from_bytes(_MARK, "little")
_NO_MARK: Final = bytes(2)
_STEPS: Final = ("mark", "body", "sequence", "unmark")
"""Of every write: a kill in between leaves the slot marked or still old."""
_HALF_MARKS: Final = frozenset({_MARK[:1] + _NO_MARK[1:], _NO_MARK[:1] + _MARK[1:]})
_MAX_SEQUENCE: Final = 2**47
"""Half of what 6 bytes hold: a higher one is damage, as a page would need 4 years of 1,000,000 writes a second."""
_CHECKED_OFFSET: Final = 12
_GENERATION_OFFSET: Final = 16
_GENERATION_END: Final = 24
_READ_ATTEMPTS: Final = 8
_NUM_STATES: Final = len(PageState)
_CRC_FACTOR: Final = 0x9E3779B1
"""2**32 divided by the golden ratio (Knuth's multiplicative hash): spreads page numbers over the CRC's 32 bits."""
_COLUMNS_FROM: Final = 20
"""Fewer entries are written one by one: calls of numpy take 40 us for any run, an entry by itself takes 2 us."""
_SCANNED_AT_ONCE: Final = 2048
"""Pages checked in one pass over columns: 512 KiB with pages of 16 tokens, so that the cost of numpy calls vanishes."""

MAX_GENERATION: Final = 2**63 - 1
"""The largest signed number of 64 bits, as numpy and peers in other languages read it."""
PLAUSIBLE_GENERATIONS: Final = 2**62
"""No pool lives to see so many allocations: an entry with more is not ours, and generations do not continue from it."""


class PageEntry(msgspec.Struct, frozen=True, gc=False):
    """The table's entry for one page. `tokens` are the filled token ids, packed (`hashing.pack_tokens`)."""

    state: PageState = PageState.FREE
    generation: int = 0
    owner_epoch: int = 0
    page_hash: bytes = NO_HASH
    parent_hash: bytes = NO_HASH
    tokens: bytes = b""
    is_first: bool = False
    is_private: bool = False

    @property
    def fill(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class EntryRun(NamedTuple):
    """The table's entries for pages that follow each other in a sequence, as columns, for `PageTable.write_run`.

    Each column has one item a page. `page_hashes` and `tokens` (packed, one page after the other) are of full pages:
    all of them are, or none. `parent` is the hash before the first page; each further one's is that of the page before
    it, or unknown. `is_first` is said of the first page, `is_private` of all.
    """

    states: Sequence[PageState]
    generations: Sequence[int]
    owner_epoch: int
    page_hashes: Sequence[bytes] = ()
    parent: bytes = NO_HASH
    tokens: bytes = b""
    is_first: bool = False
    is_private: bool = False


class Torn(msgspec.Struct, frozen=True, gc=False):
    """The table's entry for a page cannot be trusted."""


class TableScan:
    """A table's entries for all pages; iterating gives (page, what `PageTable.read` returns for it).

    `slots` has each page's newest slot as fields (`slot_dtype`), zeros where `is_torn` (bool); both of shape (pages,).
    """

    def __init__(self, slots: "Slots", is_torn: "npt.NDArray[np.bool_]") -> None:
        self.slots = slots
        self.is_torn = is_torn

    def entry(self, page: int) -> "PageEntry | Torn":
        return Torn() if self.is_torn[page] else _entry(self.slots[page].tobytes())

    def generations(self) -> list[int]:
        """Generation of every page; 0 where it cannot be trusted."""
        generation = self.slots["generation"]
        return (generation * (generation <= PLAUSIBLE_GENERATIONS)).tolist()

    def __iter__(self) -> Iterator[tuple[int, "PageEntry | Torn"]]:
        return ((page, self.entry(page)) for page in range(len(self.slots)))


@lru_cache(maxsize=8)
def slot_dtype(page_size: int) -> "np.dtype[np.void]":
    """Fields of one slot of a table of pages of `page_size` tokens; hashes and tokens as raw bytes."""
    # Imported only where it is needed: the process that actors are forked from imports this module too, and importing
    # numpy makes OpenBLAS start threads, with which it could not fork.
    import numpy as np

    numbers = [("sequence", "<u8"), ("crc", "<u4"), ("state", "u1"), ("flags", "u1"), ("fill", "<u2")]
    wide = [("generation", "<u8"), ("owner_epoch", "<u8"), ("page_hash", "V16"), ("parent_hash", "V16")]
    return np.dtype([*numbers, *wide, ("tokens", f"V{TOKEN_BYTES * page_size}")])


@lru_cache(maxsize=8)
def _stored_dtype(slot_bytes: int) -> "np.dtype[np.void]":
    """The parts of a slot as they are stored: sequence, mark, all that follows."""
    import numpy as np

    return np.dtype([("sequence", "V6"), ("mark", "<u2"), ("body", f"V{slot_bytes - _MARK_END}")])


@lru_cache(maxsize=8)
def _checked_dtype(slot_bytes: int) -> "np.dtype[np.void]":
    """The part of a slot that its checksum covers."""
    import numpy as np

    form = f"V{slot_bytes - _CHECKED_OFFSET}"
    return np.dtype({"names": ["checked"], "formats": [form], "offsets": [_CHECKED_OFFSET], "itemsize": slot_bytes})


class PageTable:
    """Reads and writes the entries of one pool's table. `view` is the table's memory; read-only is enough for reading.

    `stores_are_ordered`: another process's stores become visible in the order in which it made them.
    """

    def __init__(
        self, view: memoryview, num_pages: int, page_size: int, *, stores_are_ordered: bool = STORES_ARE_ORDERED
    ) -> None:
        needed = self.num_bytes(num_pages, page_size)
        if len(view) < needed or view.format != "B":
            raise ValueError(f"a table of {num_pages} pages needs {needed} plain bytes, got {len(view)}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._view = view
        self._stores_are_ordered = stores_are_ordered
        self._slot_bytes = HEADER_BYTES + TOKEN_BYTES * page_size
        skipped = self._slot_bytes - _GENERATION_END
        self._pair = struct.Struct(f"<Q{_GENERATION_OFFSET - 8}xQ{skipped}xQ{_GENERATION_OFFSET - 8}xQ{skipped}x")
        # Zeros after tokens of a page that is not full: those that an earlier entry left there must go.
        self._checked = struct.Struct(f"<BBHQQ16s16s{TOKEN_BYTES * page_size}s")
        self._blank = bytes(self._slot_bytes)
        # Sequence of each page's current slot; 0 means "not read yet", which costs one read.
        self._sequences = array("Q", bytes(8 * num_pages))

    @staticmethod
    def num_bytes(num_pages: int, page_size: int) -> int:
        return num_pages * 2 * (HEADER_BYTES + TOKEN_BYTES * page_size)

    def read(self, page: int) -> PageEntry | Torn:
        """The newest entry that is whole. Safe while another process writes."""
        slot = self._newest(page)
        return Torn() if slot is None else _entry(slot)

    def generation(self, page: int) -> int | None:
        """Generation of `page`, None if torn; what a transfer compares before and after it copies."""
        slot = self._newest(page)
        return None if slot is None else _HEADER.unpack_from(slot)[5]

    def peek_generations(self, pages: Sequence[int]) -> list[int]:
        """Generations of many pages, for comparison with expected ones; -1 where none can be trusted.

        Where stores become visible in the order in which they were made (x86), this costs a quarter of `generation`: it
        takes what the newer slot says and skips its CRC. A slot that has a sequence was written whole there, and memory
        damaged from outside does not happen to equal a given generation. Elsewhere a sequence may become visible before
        what was written ahead of it, so the CRC is checked. Raises ValueError for a page outside the table.
        """
        unpack, view, step = self._pair.unpack_from, self._view, self._pair.size
        # Checked once for all: page numbers come from other agents, and one outside the table would read other entries.
        if pages and not 0 <= min(pages) <= max(pages) < self.num_pages:
            raise ValueError(f"pages {min(pages)} to {max(pages)} are not all in a table of {self.num_pages}")
        if not self._stores_are_ordered:
            # Otherwise this core may have made the loads below before those of the pages that were copied.
            fence()
            return [-1 if (known := self.generation(page)) is None else known for page in pages]
        found: list[int] = []
        for page in pages:
            even, even_generation, odd, odd_generation = unpack(view, page * step)
            # A writer is at work in that slot, so the other one is what counts.
            if (even | odd) >> _MARK_BITS:
                found.append(odd_generation if even >> _MARK_BITS else even_generation)
            else:
                found.append(even_generation if even >= odd else odd_generation)
        return found

    def write(self, page: int, entry: PageEntry) -> None:
        """For the pool's scheduler only. Raises ValueError if the entry, or its generation, does not fit the table."""
        tokens, fill = entry.tokens, entry.fill
        if fill > self.page_size:
            raise ValueError(f"{fill} tokens do not fit in a page of {self.page_size}")
        if entry.generation > MAX_GENERATION:
            raise ValueError(f"generation {entry.generation} is above the highest one, {MAX_GENERATION}")
        flags = entry.is_first * FLAG_FIRST + entry.is_private * FLAG_PRIVATE
        numbers = entry.state, flags, fill, entry.generation, entry.owner_epoch
        self._put(page, self._checked.pack(*numbers, entry.page_hash, entry.parent_hash, tokens))

    def _put(self, page: int, checked: bytes) -> None:
        """Write a page's next slot; `checked` is what its checksum covers, which is the whole rest of the slot."""
        # Remembered, since reading both slots and checking them costs more than the write.
        sequence = (self._sequences[page] or self._begin(page)) + 1
        # `_crc_start`, without its call: this is done 16 times for a prompt of 128 tokens.
        crc = crc32(checked, (page * _CRC_FACTOR ^ sequence ^ sequence >> 32) & 0xFFFFFFFF)
        # Into the slot that is not current: a reader, or a successor after a kill here, still has the other one whole.
        start = (2 * page + (sequence & 1)) * self._slot_bytes
        view, mark, body = self._view, start + _MARK_OFFSET, start + _MARK_END
        # In this order: mark, body, sequence, unmark. A kill anywhere in between leaves the slot marked or still old.
        view[mark:body] = _MARK
        view[body : start + self._slot_bytes] = crc.to_bytes(4, "little") + checked
        view[start:mark] = sequence.to_bytes(6, "little")
        view[mark:body] = _NO_MARK
        self._sequences[page] = sequence

    def write_run(self, pages: Sequence[int], run: EntryRun) -> None:
        """As `write` for each of `pages`, each named once, in one pass over columns: for the pool's scheduler only.

        Each of a write's four steps is made for all pages before the next one, so each page's slot still sees them in
        their order, and a reader or a successor finds some pages old and some new, as between two calls of `write`.
        Raises ValueError, before anything is written, if an entry does not fit the table or columns differ in length.
        """
        self._require_fitting(len(pages), run)
        if len(pages) < _COLUMNS_FROM:
            self._put_each(pages, run)
            return
        import numpy as np

        numbers = np.array(pages, np.intp)
        remembered = np.frombuffer(self._sequences, np.uint64)
        known = remembered[numbers]
        if np.count_nonzero(known) < len(pages):
            for index in np.flatnonzero(known == 0).tolist():
                known[index] = self._begin(pages[index])
        sequence = known + 1
        slots = self._slots_of(numbers, sequence, run)
        # Not kept: memory that an array is made of cannot be unmapped, and the pool may be released at any time.
        dtype = _stored_dtype(self._slot_bytes)
        table = np.frombuffer(self._view, dtype, 2 * self.num_pages)
        rows = 2 * numbers + (sequence & 1).view(np.intp)
        parts = slots.view(dtype)
        values = {"mark": _MARK_NUMBER, "body": parts["body"], "sequence": parts["sequence"], "unmark": 0}
        for step in _STEPS:
            self._store(table["mark" if step == "unmark" else step], rows, values[step])
        remembered[numbers] = sequence

    def _put_each(self, pages: Sequence[int], run: EntryRun) -> None:
        pack, put, epoch, stride = self._checked.pack, self._put, run.owner_epoch, TOKEN_BYTES * self.page_size
        fill = self.page_size if run.tokens else 0
        flags = run.is_private * FLAG_PRIVATE + run.is_first * FLAG_FIRST
        # No `PageEntry` for each page: making that takes as long as its slot.
        hashes, tokens = run.page_hashes or repeat(NO_HASH), repeat(b"")
        if fill:
            tokens = [run.tokens[at : at + stride] for at in range(0, len(run.tokens), stride)]
        columns = zip(pages, run.states, run.generations, hashes, chain((run.parent,), hashes), tokens, strict=False)
        for page, state, generation, page_hash, parent, its in columns:
            put(page, pack(state, flags, fill, generation, epoch, page_hash, parent, its))
            flags &= FLAG_PRIVATE

    def scan(self) -> "TableScan":
        """What `read` returns for every page, for a successor that needs them all: many are checked at once."""
        import numpy as np

        size, dtype = self._slot_bytes, slot_dtype(self.page_size)
        newest = np.zeros(self.num_pages, dtype)
        is_torn = np.zeros(self.num_pages, np.bool_)
        table = np.frombuffer(self._view, np.uint8, 2 * size * self.num_pages).reshape(self.num_pages, 2 * size)
        for first in range(0, self.num_pages, _SCANNED_AT_ONCE):
            # Copied first: a concurrent writer must not change what has been checked.
            chunk = table[first : first + _SCANNED_AT_ONCE].copy().view(dtype)
            pages = np.arange(first, first + len(chunk))
            newest[pages] = chunk[pages - first, (chunk["sequence"][:, 1] > chunk["sequence"][:, 0]).astype(np.intp)]
            # The others: a concurrent writer, one that stopped, or damage.
            for page in pages[~self._are_sound(chunk, pages)].tolist():
                slot = self._newest(page)
                is_torn[page] = slot is None
                newest[page] = np.frombuffer(slot or self._blank, dtype)[0]
        return TableScan(newest, is_torn)

    def _require_fitting(self, num_pages: int, run: EntryRun) -> None:
        if not len(run.states) == len(run.generations) == (len(run.page_hashes) or num_pages) == num_pages:
            raise ValueError(f"columns that are not of {num_pages} pages: {run}")
        if len(run.tokens) not in (0, num_pages * TOKEN_BYTES * self.page_size):
            raise ValueError(f"{len(run.tokens)} bytes of tokens are not {num_pages} pages of {self.page_size}")
        if num_pages and max(run.generations) > MAX_GENERATION:
            raise ValueError(f"generation {max(run.generations)} is above the highest one, {MAX_GENERATION}")

    def _slots_of(self, pages: "npt.NDArray[np.intp]", sequence: "npt.NDArray[np.uint64]", run: EntryRun) -> "Slots":
        """The slots that say what `run` does, whole and with their checksums."""
        import numpy as np

        # What all have in common is packed once: each column that is set costs as much as three entries do.
        flags, fill = run.is_private * FLAG_PRIVATE, self.page_size if run.tokens else 0
        alike = _HEADER.pack(0, 0, run.states[0], flags, fill, 0, run.owner_epoch, NO_HASH, NO_HASH)
        dtype = slot_dtype(self.page_size)
        slots = np.frombuffer(bytearray(alike.ljust(self._slot_bytes, b"\0") * len(pages)), dtype)
        slots["sequence"], slots["generation"] = sequence, run.generations
        if run.states.count(run.states[0]) < len(pages):
            slots["state"] = np.frombuffer(bytes(run.states), np.uint8)
        if run.is_first:
            slots["flags"][0] = flags + FLAG_FIRST
        hashes = b"".join((run.parent, *run.page_hashes))
        parents = len(run.page_hashes) or 1
        slots["parent_hash"][:parents] = np.frombuffer(hashes, dtype["parent_hash"], parents)
        if run.page_hashes:
            slots["page_hash"] = np.frombuffer(hashes, dtype["page_hash"], offset=HASH_BYTES)
        if run.tokens:
            slots["tokens"] = np.frombuffer(run.tokens, dtype["tokens"])
        slots["crc"] = self._checksums(slots, pages, sequence)
        return slots

    @staticmethod
    def _store(field: "Slots", rows: "npt.NDArray[np.intp]", values: "Slots | int") -> None:
        """One step of the writes of many slots: everything that it stores is stored when it returns."""
        field[rows] = values

    def _checksums(
        self, slots: "Slots", pages: "npt.NDArray[np.intp]", sequence: "npt.NDArray[np.uint64]"
    ) -> list[int]:
        """The CRC of each slot, in order; of one page there may be one slot or two."""
        import numpy as np

        mixed = pages.view(np.uint64) * _CRC_FACTOR ^ sequence ^ sequence >> 32
        starts: list[int] = mixed.astype(np.uint32).ravel().tolist()
        # By zlib, 0.3 us each: a table-driven CRC of columns takes a pass over all pages for each of a slot's bytes.
        return list(map(crc32, slots.view(_checked_dtype(self._slot_bytes))["checked"].ravel().tolist(), starts))

    def _are_sound(self, pairs: "Slots", pages: "npt.NDArray[np.int64]") -> "npt.NDArray[np.bool_]":
        """Which pages, given as `pairs` of slots, have two slots that count and need no closer look by `_newest`."""
        import numpy as np

        sequence = pairs["sequence"]
        sums = self._checksums(pairs, pages[:, None], sequence)
        count = (
            (sequence > 0)
            & (sequence <= _MAX_SEQUENCE)
            & (np.array(sums, np.uint32).reshape(-1, 2) == pairs["crc"])
            & (pairs["state"] < _NUM_STATES)
            & (pairs["fill"] <= self.page_size)
            & (pairs["generation"] <= MAX_GENERATION)
        )
        never = np.nonzero(sequence == 0)
        count[never] = ~pairs[never].view(np.uint32).reshape(-1, self._slot_bytes // 4).any(axis=1)
        return count.all(axis=1) & ((sequence.min(axis=1) > 0) | (sequence.max(axis=1) <= 1))

    def _begin(self, page: int) -> int:
        """Sequence of the newest slot that counts. A torn page starts over, as if it had never been written."""
        slot = self._newest(page)
        if slot is not None:
            return _sequence(slot)
        # The first write goes to the odd slot; a reader believes it only beside an even slot that was never written.
        start = 2 * page * self._slot_bytes
        self._view[start : start + self._slot_bytes] = self._blank
        return 0

    def _newest(self, page: int) -> bytes | None:
        """None if no slot counts, or if it may not be the newest. Tried again, as a writer may spoil both copies."""
        size = self._slot_bytes
        start = 2 * page * size
        for _ in range(_READ_ATTEMPTS):
            pair = bytes(self._view[start : start + 2 * size])
            even, odd = pair[:size], pair[size:]
            even_counts, odd_counts = self._is_whole(even, page), self._is_whole(odd, page)
            if even_counts and odd_counts:
                older, newest = (odd, even) if _sequence(even) >= _sequence(odd) else (even, odd)
                # Beside a slot never written there can only be the page's first entry, in the odd slot.
                if _sequence(older) or _sequence(newest) <= 1:
                    return newest
            elif even_counts and self._is_unfinished(odd, page):
                return even
            elif odd_counts and self._is_unfinished(even, page):
                return odd
        return None

    def _is_whole(self, slot: bytes, page: int) -> bool:
        sequence, expected, state, _, fill, generation = _CHECKED.unpack_from(slot)
        if not sequence:
            return slot == self._blank
        return (
            sequence <= _MAX_SEQUENCE
            and crc32(slot[_CHECKED_OFFSET:], _crc_start(page, sequence)) == expected
            and state < _NUM_STATES
            and fill <= self.page_size
            and generation <= MAX_GENERATION
        )

    def _is_unfinished(self, slot: bytes, page: int) -> bool:
        """Whether a writer stopped in this slot: it is marked, or whole but for half a mark."""
        mark = slot[_MARK_OFFSET:_MARK_END]
        if mark in _HALF_MARKS:
            return self._is_whole(slot[:_MARK_OFFSET] + _NO_MARK + slot[_MARK_END:], page)
        return mark == _MARK


def _entry(slot: bytes) -> PageEntry:
    _, _, state, flags, fill, generation, epoch, page_hash, parent_hash = _HEADER.unpack_from(slot)
    tokens = slot[HEADER_BYTES : HEADER_BYTES + TOKEN_BYTES * fill]
    is_first, is_private = bool(flags & FLAG_FIRST), bool(flags & FLAG_PRIVATE)
    return PageEntry(PageState(state), generation, epoch, page_hash, parent_hash, tokens, is_first, is_private)


def _crc_start(page: int, sequence: int) -> int:
    return (page * _CRC_FACTOR ^ sequence ^ sequence >> 32) & 0xFFFFFFFF


def _sequence(slot: bytes) -> int:
    return _SEQUENCE.unpack_from(slot)[0]
