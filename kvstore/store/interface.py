"""What keeps pages by their hashes: `PageStore` on disk, or `InstalledPages`, which calls somebody else's store.

`Store` also is the ledger that both keep of what is read and written: how many bytes are on their way, what became of
each page, and what has ended and is for `poll` to return. A kind of store begins what is asked, in threads of its own,
which say by `_tell` what is to be done next in the owner's thread.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvstore.store.files import Page
from kvstore.store.index import Claim, PageName
from kvstore.store.missing import CHANGED, FLUSHED, LOST, WRITE_FAILED, MissingPages
from kvstore.store.missing import READ_ONLY as MISSING_READ_ONLY
from kvstore.store.operations import Read, Write

LOADING: Final = "loading"
BUSY: Final = "busy"
READ_ONLY: Final = "read only"
OFF: Final = "off"
_COUNTED: Final = {WRITE_FAILED: "write failed", CHANGED: "changed meanwhile", FLUSHED: "flushed", LOST: "lost"}
"""What is counted of pages that were to be stored, by why they are missing."""


class Stored(NamedTuple):
    """The longest run of pages, from the first one on, that is there; slot by slot."""

    slots: list[int]
    sequences: list[int]


class Listed(NamedTuple):
    """Pages of a part of a store, as hashes one after the other, and the part that is next: slot 0 if that was all."""

    hashes: bytes
    next_slot: int = 0
    used_after: int = 0


class Store(ABC):
    """All methods are called by one thread and return at once, but `wait` and `close`.

    `page_bytes` is a page over all ranks, `num_slots` how many slots there are, numbered from 0; `reading_bytes` and
    `writing_bytes` may be on their way. `missing` remembers why pages are not there. `why_off`: why nothing is stored
    or found; `last_failure`: why something was last not read or written. Both are empty if all is well.
    """

    def __init__(self, page_bytes: int, num_slots: int, reading_bytes: int, writing_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.num_slots = num_slots
        self._most_reading, self._most_writing = reading_bytes, writing_bytes
        self._reading = self._writing = 0
        self._counts: Counter[str] = Counter()
        # Filled by threads: what is to be done next, in the owner's.
        self._to_do: deque[Callable[[], None]] = deque()
        self._ended: list[Read | Write] = []
        # Writes that are not over.
        self._underway: set[Write] = set()
        self.missing = MissingPages()
        self.why_off = ""
        self.last_failure = ""

    @property
    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether it knows what it has; until then, everything is a miss."""

    @property
    def why_read_only(self) -> str:
        """Why nothing is stored any more; empty while it is."""
        return ""

    @property
    def why_buffered(self) -> str:
        """Why pages go through the kernel's cache; empty while they do not."""
        return ""

    @abstractmethod
    def find(self, prompts: Sequence[Sequence[bytes]], answer: Callable[[list[Stored]], None]) -> None:
        """Call `answer`, now or later, with what is there of each prompt, given as its pages' hashes in order."""

    @abstractmethod
    def holds(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these pages are there as far as is known, wherever they are in a prompt; none counts as used."""

    def listed(self, first_slot: int, used_after: int) -> Listed:
        """What is there from `first_slot` on; begins with 0 and -1, and goes on with what the last answer says.

        The pages used last, as many as somebody else can be told of; none from a store that cannot list them.
        """
        return Listed(b"")

    @abstractmethod
    def sequences(self, slots: Sequence[int]) -> list[int]:
        """What the slots' sequences are now, 0 where a slot holds nothing. Raises ValueError outside the store."""

    def read(self, slots: Sequence[int], sequences: Sequence[int], pages: Sequence[Page]) -> Read | None:
        """Fill `pages` from `slots`; nothing else may use that memory until `poll` returns it. None if too much waits.

        Raises ValueError for a slot outside the store.
        """
        read = Read(slots, sequences, pages)
        self._require_whole(pages)
        held = [number for number, there in enumerate(self.sequences(slots)) if there and there == sequences[number]]
        read.num_bytes = len(held) * self.page_bytes
        # A read that is larger than the limit goes alone: refused each time, it would wait for ever.
        if self._reading and self._reading + read.num_bytes > self._most_reading:
            return None
        self._reading += read.num_bytes
        self._counts["read stale"] += len(slots) - len(held)
        self._begin_read(read, held)
        return read

    def begin_write(self, names: Sequence[PageName], pages: Sequence[Page]) -> Write | None:
        """Write those of `pages` that are not there yet. They may change meanwhile, if `commit` is told that they did.

        None if nothing is to be written, or nothing can be: too much waits, or it is not known what is there.
        """
        self._require_whole(pages)
        if refused := self._refusal(len(names) * self.page_bytes):
            self._counts[f"not stored, {refused}"] += len(names)
            if refused == READ_ONLY:
                self.missing.add_hashes([name.page_hash for name in names], MISSING_READ_ONLY)
            return None
        claims = self._claim(names)
        if not claims:
            return None
        # Of a page that is offered twice the first place: parents come before children.
        at = {name.page_hash: number for number, name in reversed(list(enumerate(names)))}
        positions = [at[claim.name.page_hash] for claim in claims]
        write = Write(claims, positions, [pages[position] for position in positions])
        write.num_bytes = len(claims) * self.page_bytes
        self._writing += write.num_bytes
        self._underway.add(write)
        self._begin_write(write)
        return write

    def must_wait(self, num_pages: int) -> bool:
        """Whether `begin_write` of so many pages would be refused now, but not once what goes on has ended."""
        return self._refusal(num_pages * self.page_bytes) in (LOADING, BUSY)

    def commit(self, write: Write, is_good: Sequence[bool]) -> None:
        """Store the pages of a write that `poll` has returned; not those for which `is_good` is false.

        `is_good[i]` says that page i of `write.claims` was, from the call of `begin_write` to now, what its name says.
        """
        write.is_written = True
        kept: list[int] = []
        for number, failure in enumerate(write.failures):
            if failure:
                self._not_stored(write, number, WRITE_FAILED)
            elif write.why_forgotten or not is_good[number]:
                self._not_stored(write, number, write.why_forgotten or CHANGED)
            else:
                kept.append(number)
        self._keep(write, kept)

    def poll(self) -> list[Read | Write]:
        """Reads that have ended, writes that are to be committed, and those that are over; each once."""
        while self._to_do:
            self._to_do.popleft()()
        ended, self._ended = self._ended, []
        return ended

    @abstractmethod
    def wait(self) -> None:
        """Blocks until `poll` has something to do, which something that was begun must still bring about."""

    def stats(self) -> dict[str, float]:
        """Figures by what they count: bytes on their way, and what became of pages."""
        return {
            "off": float(bool(self.why_off)),
            "reading bytes": float(self._reading),
            "writing bytes": float(self._writing),
            **{name: float(count) for name, count in self._counts.items()},
        }

    @abstractmethod
    def close(self) -> None:
        """Blocks until all that was begun has ended, or is given up. Raises OSError if a disk does not take it."""

    # what a kind of store does

    @abstractmethod
    def _begin_read(self, read: Read, held: Sequence[int]) -> None:
        """Read the pages of these indices, whose slots have the wanted sequences, and have it said to be `_over`."""

    @abstractmethod
    def _claim(self, names: Sequence[PageName]) -> list[Claim]:
        """Those of the pages that are to be written, each once."""

    @abstractmethod
    def _begin_write(self, write: Write) -> None:
        """Read its pages' memory, and have it said to be `_over`."""

    @abstractmethod
    def _keep(self, write: Write, kept: Sequence[int]) -> None:
        """Have the pages of these indices found from now on, and it said to be `_over`."""

    @abstractmethod
    def _release(self, write: Write, number: int) -> None:
        """Page `number` of a write will not be stored."""

    @abstractmethod
    def _tell(self, work: Callable[[], None]) -> None:
        """Have `poll` do `work`, and its owner call it soon. From any thread."""

    def _refusal(self, num_bytes: int) -> str:
        """Why so many bytes cannot be written now; empty if they can."""
        return BUSY if self._writing and self._writing + num_bytes > self._most_writing else ""

    # the ledger

    def _stored(self, write: Write, number: int) -> None:
        self._counts["written"] += 1
        write.is_stored[number] = True

    def _not_stored(self, write: Write, number: int, why: str) -> None:
        self._release(write, number)
        self._counts[_COUNTED[why]] += 1
        self.missing.add_hashes([write.claims[number].name.page_hash], why)

    def _was_read(self, read: Read, number: int, outcome: str) -> None:
        self._counts[f"read {outcome}" if outcome else "read"] += 1
        read.outcomes[number] = outcome

    def _over(self, owner: Read | Write) -> None:
        """It is for `poll` to return: a read that has ended, a write whose memory was read, or one that was kept."""
        if isinstance(owner, Read):
            self._reading -= owner.num_bytes
        elif owner.is_written:
            self._writing -= owner.num_bytes
            self._underway.discard(owner)
        self._ended.append(owner)

    def _require_whole(self, pages: Sequence[Page]) -> None:
        # A page of another size would shift all that follow it in its run.
        if any(sum(map(len, page)) != self.page_bytes for page in pages):
            raise ValueError(f"a page of this store has {self.page_bytes} bytes, over all ranks")
