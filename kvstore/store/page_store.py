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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from kvstore.errors import StoreError
from kvstore.store.checksum import page_checksum
from kvstore.store.files import Page, PageFiles
from kvstore.store.heads import Head, decode_heads, encode_heads
from kvstore.store.index import Claim, PageName, StoreIndex
from kvstore.store.interface import Listed, Stored
from kvstore.store.lanes import Lane, ThreadLane
from kvstore.store.missing import CHANGED, EVICTED, FLUSHED, LOST, READ_ONLY, UNREADABLE, WRITE_FAILED, MissingPages
from kvstore.store.missing import CORRUPT as MISSING_CORRUPT
from kvstore.store.operations import (
    CORRUPT,
    FAILED,
    MEMORY_GONE,
    STALE,
    Event,
    Failure,
    Flushed,
    Loaded,
    Looked,
    NotRenewed,
    Piece,
    Read,
    Write,
    pieces_of,
    together,
)
from kvstore.store.place import HEAD_BYTES

_LOADING: Final = "loading"
_BUSY: Final = "busy"
_READ_ONLY: Final = "read only"
_OFF: Final = "off"
_COUNTED: Final = {WRITE_FAILED: "write failed", CHANGED: "changed meanwhile", FLUSHED: "flushed", LOST: "lost"}
"""What is counted of pages that were to be stored, by why they are missing."""
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


class PageStore:
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
        self._files = files
        self.page_bytes = page_bytes
        self._wake = wake
        self._limits = limits
        self._piece_pages = max(1, limits.piece_bytes // page_bytes)
        self._index: StoreIndex | None = None
        self._ended: deque[Event] = deque()
        self._told = threading.Event()
        self._is_woken = False
        self._counts: Counter[str] = Counter()
        self._failed_in_row = 0
        self._reading = self._writing = 0
        self._underway: set[Write] = set()
        self._is_looking = self._is_renewal_due = self._is_renewing = False
        self.why_off = ""
        self.missing = MissingPages()
        self.num_flushing = 0
        self.why_not_flushed = ""
        self.num_damaged_heads = 0
        self.last_failure = ""
        self._readers, self._checkers, self._writers = lanes or (
            ThreadLane("kv-store-read", limits.num_readers),
            ThreadLane("kv-store-check", limits.num_checkers),
            ThreadLane("kv-store-write", 1),
        )
        self._writers.submit(self._load)

    @property
    def is_loaded(self) -> bool:
        return self._index is not None and not self.why_off

    @property
    def num_slots(self) -> int:
        return self._files.num_slots

    @property
    def why_read_only(self) -> str:
        """Why nothing is stored any more; empty while it is."""
        if self._failed_in_row < _FAILED_WRITES:
            return ""
        return f"{self._failed_in_row} writes in a row failed, the last one because: {self.last_failure}"

    def find(self, prompts: Sequence[Sequence[bytes]], answer: Callable[[list[Stored]], None]) -> None:
        """Call `answer` with what is stored of each prompt, as `lookup` tells it."""
        answer([Stored(*self.lookup(hashes)) for hashes in prompts])

    def lookup(self, hashes: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Slots and sequences of the longest stored run of `hashes` from the first one on; they count as used."""
        found: tuple[list[int], list[int]] = ([], []) if self._index is None else self._index.lookup(hashes)
        self._counts["queried"] += len(hashes)
        self._counts["found"] += len(found[0])
        return found

    def holds(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these pages are stored, wherever they are in a prompt; none counts as used."""
        return [False] * len(hashes) if self._index is None else self._index.holds(hashes)

    def listed(self, first_slot: int, used_after: int) -> Listed:
        """Pages in the next slots; a time below 0 is chosen such that those used last are as many as may be told."""
        if self._index is None or not 0 <= first_slot < self.num_slots:
            return Listed(b"")
        since = self._index.used_after(_LISTED_PAGES) if used_after < 0 else used_after
        hashes, after = self._index.listed(first_slot, _LISTED_SLOTS, since), first_slot + _LISTED_SLOTS
        return Listed(hashes, after if after < self.num_slots else 0, since)

    def sequences(self, slots: Sequence[int]) -> list[int]:
        """What the slots' sequences are now, 0 where a slot holds nothing. Raises ValueError outside the store."""
        return self._index.sequences(slots) if self._index is not None else [0] * len(slots)

    def read(self, slots: Sequence[int], sequences: Sequence[int], pages: Sequence[Page]) -> Read | None:
        """Fill `pages` from `slots`; nothing else may use that memory until `poll` returns it. None if too much waits.

        Raises ValueError for a slot outside the store.
        """
        read = Read(slots, sequences, pages)
        self._require_whole(pages)
        held = [number for number, there in enumerate(self.sequences(slots)) if there and there == sequences[number]]
        read.num_bytes = len(held) * self.page_bytes
        if self._reading and self._reading + read.num_bytes > self._limits.reading_bytes:
            return None
        self._reading += read.num_bytes
        self._counts["read stale"] += len(slots) - len(held)
        if self._index is not None:
            read.checksums = self._index.checksums(slots)
        pieces = pieces_of(read, held, slots, self._piece_pages)
        # Each by itself, unlike what is written: somebody waits for them, and a disk does several at a time.
        for piece in pieces:
            self._readers.submit(partial(self._read, piece))
        if not pieces:
            self._end(Piece(read, 0, 0, 0))
        return read

    def begin_write(self, names: Sequence[PageName], pages: Sequence[Page]) -> Write | None:
        """Write those of `pages` that are not there yet. They may change meanwhile, if `commit` is told that they did.

        None if nothing is to be written, or nothing can be: too much waits, the index is not there yet.
        """
        self._require_whole(pages)
        refused = self._refusal(len(names) * self.page_bytes)
        if refused or self._index is None:
            self._counts[f"not stored, {refused}"] += len(names)
            if refused == _READ_ONLY:
                self.missing.add_hashes([name.page_hash for name in names], READ_ONLY)
            return None
        # By slot: pages that came one by one, among those of other prompts, lie in runs all the same.
        claims = sorted(self._index.claim(names))
        self.missing.add(self._index.take_evicted(), EVICTED)
        if not claims:
            return None
        at = {name.page_hash: number for number, name in reversed(list(enumerate(names)))}
        positions = [at[claim.name.page_hash] for claim in claims]
        write = Write(claims, positions, [pages[position] for position in positions])
        write.num_bytes = len(claims) * self.page_bytes
        self._writing += write.num_bytes
        self._underway.add(write)
        slots = [claim.slot for claim in claims]
        pieces = pieces_of(write, range(len(claims)), slots, self._piece_pages)
        # A thread's turn for as many bytes as one call to the disk has at most: with a turn for each of many short
        # pieces, threads would wake each other more often than they write.
        for some in together(pieces, self._piece_pages):
            self._checkers.submit(partial(self._sum_all, some))
        return write

    def must_wait(self, num_pages: int) -> bool:
        """Whether `begin_write` of so many pages would be refused now, but not once what goes on has ended."""
        return self._refusal(num_pages * self.page_bytes) in (_LOADING, _BUSY)

    def commit(self, write: Write, is_good: Sequence[bool]) -> None:
        """Store the pages of a write that `poll` has returned; not those for which `is_good` is false.

        `is_good[i]` says that page i of `write.claims` was, from the call of `begin_write` to now, what its name says.
        """
        assert self._index is not None, "it has given the claims"
        write.is_written = True
        kept: list[int] = []
        for number, claim in enumerate(write.claims):
            failure = write.failures[number]
            if not failure and is_good[number] and not write.why_forgotten:
                kept.append(number)
                continue
            self._not_stored(claim, WRITE_FAILED if failure else write.why_forgotten or CHANGED)
            self._index.release(claim, reusable=failure is None or not failure.is_disk)
        slots = [claim.slot for claim in write.claims]
        pieces = pieces_of(write, kept, slots, self.num_slots)
        for some in together(pieces, self.num_slots):
            self._writers.submit(partial(_each, self._write_heads, some))
        if not pieces:
            self._end(Piece(write, 0, 0, 0))

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

    def poll(self) -> list[Read | Write]:
        """Reads that have ended, writes that are to be committed, and those that are over; each once."""
        ended: list[Read | Write] = []
        # Before what has ended is taken: what ends from here on wakes again.
        self._is_woken = False
        while self._ended:
            event = self._ended.popleft()
            if isinstance(event, Loaded):
                self._index, self.num_damaged_heads = event.books, event.num_damaged
                self.last_failure = event.failure or self.last_failure
                self.why_off, self._is_renewing = "", False
            elif isinstance(event, Looked):
                self._is_looking = False
                if event.why:
                    self._lose(event.why)
            elif isinstance(event, NotRenewed):
                self.why_off, self._is_renewing = event.why, False
            elif isinstance(event, Flushed):
                self.num_flushing -= 1
                self.why_not_flushed = event.failure.reason if event.failure else ""
            elif isinstance(event, Failure):
                self.last_failure = event.reason
            else:
                piece, failure = event
                self._settle(piece, failure)
                piece.owner.num_left -= 1
                if piece.owner.num_left <= 0:
                    self._account(piece.owner)
                    ended.append(piece.owner)
        self._renew_if_unused()
        return ended

    def wait(self) -> None:
        """Blocks until `poll` has something to do, which something that was begun must still bring about."""
        self._told.wait()
        self._told.clear()

    def stats(self) -> dict[str, float]:
        """Figures by what they count: pages stored, free and so on, and what became of pages."""
        index = self._index
        books = (
            {}
            if index is None
            else {
                "stored": index.num_stored,
                "free": index.num_free,
                "claimed": index.num_claimed,
                "retired": index.num_retired,
                "evicted": index.num_evicted,
            }
        )
        return {
            "loaded": float(index is not None),
            "slots": float(self.num_slots),
            "buffered": float(bool(self.why_buffered)),
            "off": float(bool(self.why_off)),
            "damaged heads": float(self.num_damaged_heads),
            "reading bytes": float(self._reading),
            "writing bytes": float(self._writing),
            **{name: float(count) for name, count in {**books, **self._counts}.items()},
        }

    @property
    def why_buffered(self) -> str:
        """Why pages go through the kernel's cache; empty while they do not."""
        return self._files.why_buffered

    def close(self) -> None:
        """Blocks until all that was begun has ended and is on the disk. Raises OSError if the disk does not say so."""
        # In the order in which work goes on from lane to lane.
        for lane in (self._readers, self._checkers, self._writers):
            lane.close()
        self._files.close()

    # in the owner's thread

    def _require_whole(self, pages: Sequence[Page]) -> None:
        # A page of another size would shift all that follow it in its run.
        if any(sum(map(len, page)) != self.page_bytes for page in pages):
            raise ValueError(f"a page of this store has {self.page_bytes} bytes, over all ranks")

    def _settle(self, piece: Piece, failure: Failure | None) -> None:
        if failure:
            self.last_failure = failure.reason
        if isinstance(piece.owner, Read):
            self._settle_read(piece, piece.owner)
        elif piece.owner.is_written:
            self._settle_heads(piece, piece.owner, failure)
        elif failure:
            piece.owner.failures[piece.at : piece.at + piece.num_pages] = [failure] * piece.num_pages
            self._failed_in_row += failure.is_disk

    def _settle_read(self, piece: Piece, read: Read) -> None:
        now = self.sequences([read.slots[number] for number in piece.range])
        for number, sequence in zip(piece.range, now, strict=True):
            outcome = read.outcomes[number]
            # Whatever was found in a slot that holds another page by now, it says nothing about this one.
            if sequence != read.sequences[number]:
                outcome = read.outcomes[number] = STALE
            elif outcome in (CORRUPT, FAILED):
                self._forget(read.slots[number], sequence, reusable=outcome == CORRUPT)
            self._counts[f"read {outcome}" if outcome else "read"] += 1

    def _settle_heads(self, piece: Piece, write: Write, failure: Failure | None) -> None:
        assert self._index is not None, "it has given the claims"
        for number in piece.range:
            if failure:
                self._index.release(write.claims[number], reusable=False)
                self._not_stored(write.claims[number], WRITE_FAILED)
            elif write.why_forgotten:
                self._index.release(write.claims[number])
                self._not_stored(write.claims[number], write.why_forgotten)
            else:
                self._index.publish(write.claims[number], write.checksums[number])
                write.is_stored[number] = True
                self._counts["written"] += 1
        if piece.num_pages:
            self._failed_in_row = self._failed_in_row + 1 if failure else 0

    def _not_stored(self, claim: Claim, why: str) -> None:
        self._counts[_COUNTED[why]] += 1
        self.missing.add_hashes([claim.name.page_hash], why)

    def _account(self, owner: Read | Write) -> None:
        if isinstance(owner, Read):
            self._reading -= owner.num_bytes
        elif owner.is_written:
            self._writing -= owner.num_bytes
            self._underway.discard(owner)

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

    def _refusal(self, num_bytes: int) -> str:
        if self.why_off:
            return _OFF
        if self._index is None:
            return _LOADING
        if self.why_read_only:
            return _READ_ONLY
        if self._writing and self._writing + num_bytes > self._limits.writing_bytes:
            return _BUSY
        return ""

    # in other threads

    def _look(self) -> None:
        why = self._files.look()
        if not why and self.why_read_only and _attempt(self._files.try_out) is None:
            # Slots that could not be written are given again then, too.
            why = "it takes writes again, and is opened anew"
        self._tell(Looked(why))

    def _renew(self, after: int) -> None:
        try:
            self._files.renew()
        except StoreError as error:
            self._tell(NotRenewed(error.message))
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
        self._tell(Loaded(index, num_damaged, failure))

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
            self._tell(failure)

    def _zero_all_heads(self) -> None:
        failure: Failure | None = None
        for first in range(0, self.num_slots, _LOADED_AT_ONCE):
            count = min(_LOADED_AT_ONCE, self.num_slots - first)
            failure = _attempt(partial(self._files.write_heads, first, bytes(count * HEAD_BYTES))) or failure
        self._tell(Flushed(failure))

    def _end(self, piece: Piece, failure: Failure | None = None) -> None:
        self._tell((piece, failure))

    def _tell(self, event: Event) -> None:
        self._ended.append(event)
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
