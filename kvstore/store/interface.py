"""What keeps pages by their hashes: `PageStore` on disk, or `InstalledPages`, which calls somebody else's store."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.store.files import Page
from kvstore.store.index import PageName
from kvstore.store.missing import MissingPages
from kvstore.store.operations import Read, Write


class Stored(NamedTuple):
    """The longest run of pages, from the first one on, that is there; slot by slot."""

    slots: list[int]
    sequences: list[int]


class Listed(NamedTuple):
    """Pages of a part of a store, as hashes one after the other, and the part that is next: slot 0 if that was all."""

    hashes: bytes
    next_slot: int = 0
    used_after: int = 0


class Store(Protocol):
    """All methods are called by one thread and return at once, but `wait` and `close`.

    `missing` remembers why pages are not there.
    """

    missing: MissingPages

    @property
    def is_loaded(self) -> bool:
        """Whether it knows what it has; until then, everything is a miss."""
        ...

    @property
    def last_failure(self) -> str:
        """Why something was last not read or written; empty if all was."""
        ...

    @property
    def page_bytes(self) -> int:
        """Of a page over all ranks."""
        ...

    @property
    def num_slots(self) -> int:
        """Slots are numbered from 0 to below this."""
        ...

    @property
    def why_read_only(self) -> str:
        """Why nothing is stored any more; empty while it is."""
        ...

    @property
    def why_buffered(self) -> str:
        """Why pages go through the kernel's cache; empty while they do not."""
        ...

    @property
    def why_off(self) -> str:
        """Why nothing is stored or found; empty while it is."""
        ...

    def find(self, prompts: Sequence[Sequence[bytes]], answer: Callable[[list[Stored]], None]) -> None:
        """Call `answer`, now or later, with what is there of each prompt, given as its pages' hashes in order."""
        ...

    def holds(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these pages are there as far as is known, wherever they are in a prompt; none counts as used."""
        ...

    def listed(self, first_slot: int, used_after: int) -> Listed:
        """What is there from `first_slot` on; begins with 0 and -1, and goes on with what the last answer says.

        The pages used last, as many as somebody else can be told of; none from a store that cannot list them.
        """
        ...

    def sequences(self, slots: Sequence[int]) -> list[int]:
        """What the slots' sequences are now, 0 where a slot holds nothing. Raises ValueError outside the store."""
        ...

    def read(self, slots: Sequence[int], sequences: Sequence[int], pages: Sequence[Page]) -> Read | None:
        """Fill `pages` from `slots`, until `poll` returns it. None if too much waits."""
        ...

    def begin_write(self, names: Sequence[PageName], pages: Sequence[Page]) -> Write | None:
        """Write those of `pages` that are not there yet. None if nothing is to be written, or nothing can be."""
        ...

    def must_wait(self, num_pages: int) -> bool:
        """Whether `begin_write` of so many pages would be refused now, but not once what goes on has ended."""
        ...

    def commit(self, write: Write, is_good: Sequence[bool]) -> None:
        """Store the pages of a write that `poll` has returned; not those for which `is_good` is false."""
        ...

    def poll(self) -> list[Read | Write]:
        """Reads that have ended, writes that are to be committed, and those that are over; each once."""
        ...

    def wait(self) -> None:
        """Blocks until `poll` has something to do, which something that was begun must still bring about."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Figures by what they count."""
        ...

    def close(self) -> None:
        """Blocks until all that was begun has ended, or is given up. Raises OSError if a disk does not take it."""
        ...
