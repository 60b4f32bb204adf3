"""A store of KV pages on disk: finds pages by their hashes, reads them into memory, writes pages into slots.

    found = store.lookup(hashes)                     # the longest stored prefix: slots and their sequences
    read = store.read(*found, pages)                 # into memory, e.g. a pool's; its end comes from `poll`
    write = store.begin_write(names, pages)          # from memory; `poll` returns it once the bytes are on their way
    store.commit(write, is_good)                     # the caller has compared generations: now heads are written

Nothing is locked. A slot may be given to another page at any time, which changes its sequence first; so a read says of
each page whether the slot still had the sequence afterwards and whether the bytes have the checksum that its head
tells. A page is right, or it is a miss; and one that does not have its checksum is forgotten.

All methods are called by one thread and return at once (but `close`). Files and checksums are the business of other
threads: reads in one lane, writes in another of one thread, so that what is written to a slot is written in order, and
checksums in a third, so that a page is checked while the next ones are read.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from typing_extensions import override

from kvstore.errors import StoreError
from kvstore.store.checksum import page_checksum
from kvstore.store.files import PageFiles
from kvstore.store.heads import Head, decode_heads, encode_heads
from kvstore.store.index import Claim, PageName, StoreIndex
from kvstore.store.interface import LOADING, OFF, READ_ONLY, Listed, Store, Stored
from kvstore.store.lanes import Lane, ThreadLane
from kvstore.store.missing import CORRUPT as MISSING_CORRUPT
from kvstore.store.missing import EVICTED, FLUSHED, LOST, UNREADABLE, WRITE_FAILED
from kvstore.store.operations import (
    CORRUPT,
    FAILED,
    MEMORY_GONE,
    STALE,
    Failure,
    Piece,
    Read,
    Write,
    pieces_of,
    together,
)
from kvstore.store.place import HEAD_BYTES

_LOADED_AT_ONCE: Final = 1 << 15
"""Heads read and checked in one pass: 2 MiB, so that what is computed stays in the processor's cache."""
_LISTED_SLOTS: Final = 4096
"""Looked at for one answer of `listed`: 64 KiB of hashes at most, far below what a message may have."""
_LISTED_PAGES: Final = 262_144
"""In all answers together: as many as a tokenizer remembers of a scheduler, and half of what is kept for followers that
miss publications (8 MiB)."""
_FLUSHED_REMEMBERED: Final = 8192
"""Pages of which a flush remembers that it took them, a microsecond each, while nothing else is answered."""
_FAILED_WRITES: Final = 8
"""So many in a row, and nothing more is written: each takes a page away, and a disk that is full stays so."""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Threads, bytes of one call to the disk, and bytes that may be on their way in each direction.

    Two readers: while one hands over a run the other has the disk. Checksums run at 1.6 GB/s a thread. A restore of
    6,000 tokens of a small model has 80 MB; what is stored comes at the rate of prefills, tens of MB a second.
    """

    num_readers: int = 2
    num_checkers: int = 2
    piece_bytes: int = 2 << 20
    reading_bytes: int = 1 << 30
    writing_bytes: int = 256 << 20


DEFAULT_LIMITS: Final = StoreLimits()


class PageStore(Store):
    """See the module. `wake` is called, from any thread, when `poll` has something to return; `close` closes `files`.

    `lanes` are the ones for reads, checksums and writes; own threads by default. Until the index is rebuilt, which is
    done in the lane for writes, everything is a miss.
    """

    def __init__(
        self,
        files: PageFiles,
        page_bytes: int,
        wake: Callable[[], None],
        limits: StoreLimits = DEFAULT_LIMITS,
        lanes: tuple[Lane, Lane, Lane] | None = None,
    ) -> None:
        super().__init__(page_bytes, files.num_slots, limits.reading_bytes, limits.writing_bytes)
        self._files = files
        self._wake = wake
        self._piece_pages = max(1, limits.piece_bytes // page_bytes)
        self._index: StoreIndex | None = None
        self._told = threading.Event()
        self._is_woken = False
        self._failed_in_row = 0
        self._is_looking = self._is_renewal_due = self._is_renewing = False
        self.num_flushing = 0
        self.why_not_flushed = ""
        self.num_damaged_heads = 0
        self._readers, self._checkers, self._writers = lanes or (
            ThreadLane("kv-store-read", limits.num_readers),
            ThreadLane("kv-store-check", limits.num_checkers),
            ThreadLane("kv-store-write", 1),
        )
        self._writers.submit(self._load)

    @property
    @override
    def is_loaded(self) -> bool:
        return self._index is not None and not self.why_off

    @property
    @override
    def why_read_only(self) -> str:
        if self._failed_in_row < _FAILED_WRITES:
            return ""
        return f"{self._failed_in_row} writes in a row failed, the last one because: {self.last_failure}"

    @property
    @override
    def why_buffered(self) -> str:
        return self._files.why_buffered

    @override
    def find(self, prompts: Sequence[Sequence[bytes]], answer: Callable[[list[Stored]], None]) -> None:
        answer([Stored(*self.lookup(hashes)) for hashes in prompts])

    def lookup(self, hashes: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Slots and sequences of the longest stored run of `hashes` from the first one on; they count as used."""
        found: tuple[list[int], list[int]] = ([], []) if self._index is None else self._index.lookup(hashes)
        self._counts["queried"] += len(hashes)
        self._counts["found"] += len(found[0])
        return found

    @override
    def holds(self, hashes: Sequence[bytes]) -> list[bool]:
        return [False] * len(hashes) if self._index is None else self._index.holds(hashes)

    @override
    def listed(self, first_slot: int, used_after: int) -> Listed:
        if self._index is None or not 0 <= first_slot < self.num_slots:
            return Listed(b"")
        since = self._index.used_after(_LISTED_PAGES) if used_after < 0 else used_after
        hashes, after = self._index.listed(first_slot, _LISTED_SLOTS, since), first_slot + _LISTED_SLOTS
        return Listed(hashes, after if after < self.num_slots else 0, since)

    @override
    def sequences(self, slots: Sequence[int]) -> list[int]:
        return self._index.sequences(slots) if self._index is not None else [0] * len(slots)

    def flush(self) -> int:
        """Forget every page, those that are being written included; returns how many were stored. Once it is loaded.

        What is being read ends as stale. `num_flushing` sinks again once no restart can find any of them, or
        `why_not_flushed` says why one may. The pages' bytes stay where they are until their slots are written again.
        """
        assert self._index is not None, "the caller has waited for it"
        for write in self._underway:
            write.why_forgotten = FLUSHED
        self.num_flushing += 1
        # Behind all heads that were given to this lane before. After it come only heads of pages that are given later.
        self._writers.submit(self._zero_all_heads)
        self.missing.add(self._index.used_last(_FLUSHED_REMEMBERED), FLUSHED)
        return self._index.clear()

    def look(self) -> None:
        """Have the files looked at, once what was given to be written is. If they are gone, so are all pages.

        Then, and when a disk takes writes again that took none, they are opened anew (`renew`).
        """
        if not self._is_looking and not self.why_off:
            self._is_looking = True
            self._writers.submit(self._look)

    def renew(self) -> None:
        """Have the files opened anew as soon as nobody uses them; `why_off` is empty again when they are."""
        self._is_renewal_due = not self._is_renewing
        self._renew_if_unused()

    @override
    def poll(self) -> list[Read | Write]:
        # Before what has ended is taken: what ends from here on wakes again.
        self._is_woken = False
        ended = super().poll()
        self._renew_if_unused()
        return ended

    @override
    def wait(self) -> None:
        self._told.wait()
        self._told.clear()

    @override
    def stats(self) -> dict[str, float]:
        index = self._index
        figures: dict[str, float] = {
            "loaded": index is not None,
            "slots": self.num_slots,
            "buffered": bool(self.why_buffered),
            "damaged heads": self.num_damaged_heads,
        }
        if index is not None:
            figures |= {
                "stored": index.num_stored,
                "free": index.num_free,
                "claimed": index.num_claimed,
                "retired": index.num_retired,
                "evicted": index.num_evicted,
            }
        return {**{name: float(figure) for name, figure in figures.items()}, **super().stats()}

    @override
    def close(self) -> None:
        # In the order in which work goes on from lane to lane.
        for lane in (self._readers, self._checkers, self._writers):
            lane.close()
        self._files.close()

    # in the owner's thread

    @override
    def _begin_read(self, read: Read, held: Sequence[int]) -> None:
        if self._index is not None:
            read.checksums = self._index.checksums(read.slots)
        pieces = pieces_of(read, held, read.slots, self._piece_pages)
        # Each by itself, unlike what is written: somebody waits for them, and a disk does several at a time.
        for piece in pieces:
            self._readers.submit(partial(self._read, piece))
        if not pieces:
            self._end(Piece(read, 0, 0, 0))

    @override
    def _refusal(self, num_bytes: int) -> str:
        if self.why_off:
            return OFF
        if self._index is None:
            return LOADING
        return READ_ONLY if self.why_read_only else super()._refusal(num_bytes)

    @override
    def _claim(self, names: Sequence[PageName]) -> list[Claim]:
        assert self._index is not None, "nothing is written before"
        # By slot: pages that came one by one, among those of other prompts, lie in runs all the same.
        claims = sorted(self._index.claim(names))
        self.missing.add(self._index.take_evicted(), EVICTED)
        return claims

    @override
    def _begin_write(self, write: Write) -> None:
        slots = [claim.slot for claim in write.claims]
        pieces = pieces_of(write, range(len(slots)), slots, self._piece_pages)
        # A thread's turn for as many bytes as one call to the disk has at most: with a turn for each of many short
        # pieces, threads would wake each other more often than they write.
        for some in together(pieces, self._piece_pages):
            self._checkers.submit(partial(self._sum_all, some))

    @override
    def _keep(self, write: Write, kept: Sequence[int]) -> None:
        slots = [claim.slot for claim in write.claims]
        pieces = pieces_of(write, kept, slots, self.num_slots)
        for some in together(pieces, self.num_slots):
            self._writers.submit(partial(_each, self._write_heads, some))
        if not pieces:
            self._end(Piece(write, 0, 0, 0))

    @override
    def _release(self, write: Write, number: int) -> None:
        assert self._index is not None, "it has given the claims"
        failure = write.failures[number]
        self._index.release(write.claims[number], reusable=failure is None or not failure.is_disk)

    def _settle(self, piece: Piece, failure: Failure | None) -> None:
        owner = piece.owner
        if failure:
            self.last_failure = failure.reason
        if isinstance(owner, Read):
            self._settle_read(piece, owner)
        elif failure:
            owner.failures[piece.at : piece.at + piece.num_pages] = [failure] * piece.num_pages
            self._failed_in_row += failure.is_disk
        if isinstance(owner, Write) and owner.is_written:
            self._settle_heads(piece, owner, failure)
        owner.num_left -= 1
        if owner.num_left <= 0:
            self._over(owner)

    def _settle_read(self, piece: Piece, read: Read) -> None:
        now = self.sequences([read.slots[number] for number in piece.range])
        for number, sequence in zip(piece.range, now, strict=True):
            outcome = read.outcomes[number]
            # Whatever was found in a slot that holds another page by now, it says nothing about this one.
            if sequence != read.sequences[number]:
                outcome = STALE
            elif outcome in (CORRUPT, FAILED):
                self._forget(read.slots[number], sequence, reusable=outcome == CORRUPT)
            self._was_read(read, number, outcome)

    def _settle_heads(self, piece: Piece, write: Write, failure: Failure | None) -> None:
        assert self._index is not None, "it has given the claims"
        for number in piece.range:
            if why := WRITE_FAILED if failure else write.why_forgotten:
                self._not_stored(write, number, why)
            else:
                self._index.publish(write.claims[number], write.checksums[number])
                self._stored(write, number)
        if piece.num_pages and not failure:
            self._failed_in_row = 0

    def _forget(self, slot: int, sequence: int, *, reusable: bool) -> None:
        assert self._index is not None, "it has given the slot"
        page_hash = self._index.hash_at(slot)
        if self._index.drop(slot, sequence, reusable=reusable):
            self.missing.add_hashes([page_hash], MISSING_CORRUPT if reusable else UNREADABLE)
            # In the lane of writes, so before anything that is written to this slot later.
            self._writers.submit(partial(self._zero_head, slot))

    def _lose(self, why: str) -> None:
        assert self._index is not None, "its heads were read before the files were looked at"
        self.why_off = why
        for write in self._underway:
            write.why_forgotten = LOST
        self.missing.add(self._index.used_last(_FLUSHED_REMEMBERED), LOST)
        self._index.clear()
        self.renew()

    def _renew_if_unused(self) -> None:
        # A descriptor that is closed while a thread reads from it may be another file's by then.
        if not self._is_renewal_due or self._underway or self._reading:
            return
        self._is_renewal_due, self._is_renewing, self._failed_in_row = False, True, 0
        assert self._index is not None, "its heads were read before"
        self._writers.submit(partial(self._renew, self._index.last_sequence))

    def _looked(self, why: str) -> None:
        self._is_looking = False
        if why:
            self._lose(why)

    def _loaded(self, index: StoreIndex, num_damaged: int, failure: str) -> None:
        self._index, self.num_damaged_heads = index, num_damaged
        self.last_failure = failure or self.last_failure
        self.why_off, self._is_renewing = "", False

    def _not_renewed(self, why: str) -> None:
        self.why_off, self._is_renewing = why, False

    def _flushed(self, failure: Failure | None) -> None:
        self.num_flushing -= 1
        self.why_not_flushed = failure.reason if failure else ""

    def _failed(self, why: str) -> None:
        self.last_failure = why

    # in other threads

    def _look(self) -> None:
        why = self._files.look()
        if not why and self.why_read_only and _attempt(self._files.try_out) is None:
            # Slots that could not be written are given again then, too.
            why = "it takes writes again, and is opened anew"
        self._tell(partial(self._looked, why))

    def _renew(self, after: int) -> None:
        try:
            self._files.renew()
        except StoreError as error:
            self._tell(partial(self._not_renewed, error.message))
        else:
            self._load(after)

    def _load(self, after: int = 0) -> None:
        index, num_damaged, failure = StoreIndex(self._files.num_slots), 0, ""
        try:
            for first in range(0, index.num_slots, _LOADED_AT_ONCE):
                count = min(_LOADED_AT_ONCE, index.num_slots - first)
                num_damaged += index.load(first, decode_heads(self._files.read_heads(first, count)))
            index.finish_loading(after)
        except OSError as error:
            # An empty store is better than none: the slots whose heads were not read are written again.
            index, failure = StoreIndex(self._files.num_slots), f"its heads could not be read: {error.strerror}"
            index.finish_loading(after)
        self._tell(partial(self._loaded, index, num_damaged, failure))

    def _read(self, piece: Piece) -> None:
        read = piece.owner
        assert isinstance(read, Read), "only reads come here"
        failure = _attempt(partial(self._files.read_pages, piece.slot, piece.pages))
        if failure is not None:
            # One by one: a bad sector must not cost the pages around it.
            for number in piece.range:
                slot = piece.slot + number - piece.at
                alone = _attempt(partial(self._files.read_pages, slot, [read.pages[number]]))
                if alone is not None:
                    read.outcomes[number] = FAILED if alone.is_disk else MEMORY_GONE
        self._checkers.submit(partial(self._check, piece, failure))

    def _check(self, piece: Piece, failure: Failure | None) -> None:
        read = piece.owner
        assert isinstance(read, Read), "only what was read is checked"
        for number in piece.range:
            if read.outcomes[number] in (FAILED, MEMORY_GONE):
                continue
            try:
                is_right = page_checksum(read.pages[number]) == read.checksums[number]
                read.outcomes[number] = "" if is_right else CORRUPT
            except ValueError:
                # A view that was released between the two lanes.
                read.outcomes[number] = MEMORY_GONE
        self._end(piece, failure)

    def _sum_all(self, pieces: Sequence[Piece]) -> None:
        summed: list[Piece] = []
        for piece in pieces:
            owner = piece.owner
            assert isinstance(owner, Write), "only what is written is summed"
            try:
                for number in piece.range:
                    owner.checksums[number] = page_checksum(owner.pages[number])
            except ValueError as error:
                self._end(piece, _gone(error))
            else:
                summed.append(piece)
        self._writers.submit(partial(_each, self._write, summed))

    def _write(self, piece: Piece) -> None:
        # The old head first: were it to stay, a kill below would leave it with a part of this page.
        failure = _attempt(partial(self._files.write_heads, piece.slot, bytes(piece.num_pages * HEAD_BYTES)))
        if failure is None:
            failure = _attempt(partial(self._files.write_pages, piece.slot, piece.pages))
        self._end(piece, failure)

    def _write_heads(self, piece: Piece) -> None:
        write = piece.owner
        assert isinstance(write, Write), "only writes have heads"
        heads = [
            Head(*write.claims[number].name, write.claims[number].sequence, write.checksums[number])
            for number in piece.range
        ]
        self._end(piece, _attempt(partial(self._files.write_heads, piece.slot, encode_heads(piece.slot, heads))))

    def _zero_head(self, slot: int) -> None:
        failure = _attempt(partial(self._files.write_heads, slot, bytes(HEAD_BYTES)))
        if failure is not None:
            self._tell(partial(self._failed, failure.reason))

    def _zero_all_heads(self) -> None:
        failure: Failure | None = None
        for first in range(0, self.num_slots, _LOADED_AT_ONCE):
            count = min(_LOADED_AT_ONCE, self.num_slots - first)
            failure = _attempt(partial(self._files.write_heads, first, bytes(count * HEAD_BYTES))) or failure
        self._tell(partial(self._flushed, failure))

    def _end(self, piece: Piece, failure: Failure | None = None) -> None:
        self._tell(partial(self._settle, piece, failure))

    @override
    def _tell(self, work: Callable[[], None]) -> None:
        self._to_do.append(work)
        self._told.set()
        # Once until it is polled: an event loop takes 10 us for each, and a write of scattered pages ends in many.
        if not self._is_woken:
            self._is_woken = True
            self._wake()


def _each(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        work(piece)


def _attempt(work: Callable[[], None]) -> Failure | None:
    """Why `work` failed, None if it did not."""
    try:
        work()
    except OSError as error:
        return Failure(error.strerror or str(error))
    except ValueError as error:
        return _gone(error)
    return None


def _gone(error: ValueError) -> Failure:
    # What is said of a view that was released: its pool was closed meanwhile.
    return Failure(f"the pages' memory is gone: {error}", is_disk=False)
