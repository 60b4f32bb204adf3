"""What a store is doing: pages being read or written, and the runs that `page_store.py` cuts them into."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.store.files import Page
from kvstore.store.index import Claim

STALE: Final = "stale"
"""The slot holds another page by now, or none."""
CORRUPT: Final = "corrupt"
"""The bytes do not have the checksum that they had when they were written."""
UNSIGNED: Final = "unsigned"
"""Nobody who has the mesh's key has put it into an installed store."""
FAILED: Final = "failed"
"""The disk did not read it."""
MEMORY_GONE: Final = "memory gone"
"""The pool that it was to be read into was closed."""


class Failure(NamedTuple):
    """Why something was not done; `is_disk` is false if the memory was gone."""

    reason: str
    is_disk: bool = True


class Read:
    """Pages on their way from slots into memory. `outcomes[i]`, once it has ended, is empty if page i is right."""

    is_needed: bool = True
    """False once nobody wants it any more: what has not begun need not begin."""

    def __init__(self, slots: Sequence[int], sequences: Sequence[int], pages: Sequence[Page]) -> None:
        self.slots = slots
        self.sequences = sequences
        self.pages = pages
        self.checksums: Sequence[int] = ()
        self.outcomes = [STALE] * len(slots)
        self.num_left = 0
        self.num_bytes = 0


class Write:
    """Pages on their way from memory into slots; only those that needed a slot and got one.

    `positions[i]` is where `claims[i]` was among the names given. After its first return from `poll` it must be
    committed, after its second it is over, and `is_stored[i]` tells which pages are found from now on.
    """

    reads_memory: bool = True
    """False once what is written was copied, so that the memory may go."""

    def __init__(self, claims: Sequence[Claim], positions: Sequence[int], pages: Sequence[Page]) -> None:
        self.claims = claims
        self.positions = positions
        self.pages = pages
        self.checksums = [0] * len(claims)
        self.failures: list[Failure | None] = [None] * len(claims)
        self.is_stored = [False] * len(claims)
        self.is_written = False
        # Its pages are not to be found: the store was flushed, or its files were lost, after they were given.
        self.why_forgotten = ""
        self.num_left = 0
        self.num_bytes = 0


class Piece(NamedTuple):
    """A run of slots of one `Read` or `Write`: its slots begin at `slot`, its pages at index `at`."""

    owner: Read | Write
    slot: int
    at: int
    num_pages: int

    @property
    def range(self) -> range:
        return range(self.at, self.at + self.num_pages)

    @property
    def pages(self) -> Sequence[Page]:
        return self.owner.pages[self.at : self.at + self.num_pages]


def pieces_of(owner: Read | Write, numbers: Sequence[int], slots: Sequence[int], most: int) -> list[Piece]:
    """The pages of `numbers` (ascending indices into `slots`) as runs whose slots and indices ascend together.

    The owner has as many left.
    """
    pieces: list[Piece] = []
    slot, at, count = 0, 0, 0
    for number in numbers:
        if count and count < most and number == at + count and slots[number] == slot + count:
            count += 1
            continue
        if count:
            pieces.append(Piece(owner, slot, at, count))
        slot, at, count = slots[number], number, 1
    if count:
        pieces.append(Piece(owner, slot, at, count))
    owner.num_left = len(pieces)
    return pieces


def together(pieces: Sequence[Piece], num_pages: int) -> Iterator[list[Piece]]:
    """Pieces in lists of `num_pages` pages at most, or of one piece that has more."""
    some: list[Piece] = []
    room = num_pages
    for piece in pieces:
        if some and piece.num_pages > room:
            yield some
            some, room = [], num_pages
        some.append(piece)
        room -= piece.num_pages
    if some:
        yield some
