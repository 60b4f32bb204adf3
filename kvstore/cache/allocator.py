"""Who owns each page of a pool. Each is in one of seven states, and these are the only moves between them.

    FREE -> RUNNING, GRANTED        allocate
    RUNNING -> FREE                 release
    RUNNING -> CACHED               cache
    CACHED -> FREE                  evict
    RUNNING -> GRANTED              grant
    GRANTED -> IN_FLIGHT            start_transfer
    GRANTED, IN_FLIGHT -> RUNNING   accept
    GRANTED, IN_FLIGHT -> FREE      revoke
    any -> QUARANTINED -> FREE      quarantine or check, clear
    FREE -> any                     adopt, when a scheduler takes over a pool that is in use
    RESERVED                        page 0, for padding: never moves

CACHED pages belong to the prefix tree, RUNNING pages to a sequence. GRANTED pages are lent to a transfer that has not
begun; IN_FLIGHT pages may be written by a transfer. QUARANTINED pages may still be written by somebody who must not, or
the books disagreed about them. Pure; used only by the scheduler's prefix cache.

A move whose pages are not all in the state it needs raises `OwnershipError` and changes nothing. `check` compares the
books and quarantines pages about which they disagree; it never raises.
"""

import enum
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from kvstore.errors import OwnershipError
from kvstore.layout import PADDING_PAGE


class PageState(enum.IntEnum):
    """State of one page; the value is what the page table stores."""

    FREE = 0
    RUNNING = 1
    CACHED = 2
    GRANTED = 3
    IN_FLIGHT = 4
    QUARANTINED = 5
    RESERVED = 6


_Found = TypeVar("_Found")
Slices = Generator[None, None, _Found]
"""Work in slices of a millisecond; nothing that it looks at may change in between."""
PAGES_AT_ONCE: Final = 2048
"""Pages of a slice: 0.6 ms, or 1 ms where pages have to be looked at one by one."""

_STATES: Final = tuple(PageState)
_LISTED_IF_FREE: Final = bytes([1]) + bytes(255)
_MANY: Final = 255
_SETTLED: Final = (PageState.RESERVED, PageState.QUARANTINED)
# Sets of states are bytes, as the states of many pages are: which of them are not in a set is then one call.
_FREE: Final = bytes([PageState.FREE])
_RUNNING: Final = bytes([PageState.RUNNING])
_CACHED: Final = bytes([PageState.CACHED])
_GRANTED: Final = bytes([PageState.GRANTED])
_LENT: Final = bytes([PageState.GRANTED, PageState.IN_FLIGHT])
_QUARANTINED: Final = bytes([PageState.QUARANTINED])
_MOVABLE: Final = bytes(set(PageState) - {PageState.RESERVED})


class Violation(NamedTuple):
    """A page about which the books disagreed; it has been quarantined."""

    page: int
    found: str
    needed: str


def whole(slices: Slices[_Found]) -> _Found:
    """All slices at once."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


class PageAllocator:
    """State of every page of one pool."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is padding), got {num_pages}")
        self.num_pages = num_pages
        self._states = bytearray(_FREE) * num_pages
        self._states[PADDING_PAGE] = PageState.RESERVED
        # By state. No dictionary: the hash of an enum's member is a call.
        self._counts = [0] * len(PageState)
        self._counts[PageState.FREE] = num_pages - 1
        self._counts[PageState.RESERVED] = 1
        # A stack with low pages on top: the page freed last is reused first, and runs of pages stay runs.
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def state(self, page: int) -> PageState:
        return _STATES[self._states[page]]

    def states(self, pages: Sequence[int]) -> list[PageState]:
        return [_STATES[state] for state in map(self._states.__getitem__, pages)]

    def count(self, state: PageState) -> int:
        return self._counts[state]

    def allocate(self, num_pages: int, state: PageState = PageState.RUNNING) -> list[int] | None:
        """FREE to RUNNING, or to GRANTED at once if they are about to be lent; all `num_pages` or None."""
        if num_pages > len(self._free):
            return None
        if num_pages <= 0:
            return []
        # From the end: taking pages from the front of a list would move all the others, for each prompt.
        pages = self._free[: -num_pages - 1 : -1]
        del self._free[-num_pages:]
        self._set(pages, _FREE * num_pages, state)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        self._move(pages, _RUNNING, PageState.FREE)

    def cache(self, pages: Sequence[int]) -> None:
        self._move(pages, _RUNNING, PageState.CACHED)

    def evict(self, pages: Sequence[int]) -> None:
        self._move(pages, _CACHED, PageState.FREE)

    def grant(self, pages: Sequence[int]) -> None:
        self._move(pages, _RUNNING, PageState.GRANTED)

    def start_transfer(self, pages: Sequence[int]) -> None:
        self._move(pages, _GRANTED, PageState.IN_FLIGHT)

    def accept(self, pages: Sequence[int]) -> None:
        self._move(pages, _LENT, PageState.RUNNING)

    def revoke(self, pages: Sequence[int]) -> None:
        self._move(pages, _LENT, PageState.FREE)

    def quarantine(self, pages: Sequence[int]) -> None:
        self._move(pages, _MOVABLE, PageState.QUARANTINED)

    def clear(self, pages: Sequence[int]) -> None:
        self._move(pages, _QUARANTINED, PageState.FREE)

    def adopt(self, pages: Sequence[int], state: PageState) -> None:
        self._move(pages, _FREE, state)

    def checking(self, claimed: bytearray | None = None) -> Slices[list[Violation]]:
        """Compare states, counts and free list, and `claimed`: of each page the state that its holder sees, or FREE.

        Pages that disagree are quarantined and returned. Without claims only the allocator's own books are compared.
        """
        listed = bytearray(self.num_pages)
        violations: list[Violation] = []
        for begin in range(0, len(self._free), PAGES_AT_ONCE):
            for page in self._free[begin : begin + PAGES_AT_ONCE]:
                if not 0 <= page < self.num_pages:
                    violations.append(Violation(page, "in the free list", "a page of the pool"))
                else:
                    listed[page] = min(listed[page] + 1, _MANY)
            yield
        for begin in range(0, self.num_pages, PAGES_AT_ONCE):
            end = begin + PAGES_AT_ONCE
            states = self._states[begin:end]
            # Whole slices are compared by calls of C, and pages looked at one by one only where they differ.
            is_alike = listed[begin:end] == states.translate(_LISTED_IF_FREE)
            if claimed is not None and claimed[begin:end] != states:
                is_alike = False
            if not is_alike:
                violations += self._differences(range(begin, min(end, self.num_pages)), listed, claimed)
            yield
        self._repair([violation.page for violation in violations])
        return violations

    def _differences(self, pages: Iterable[int], listed: bytearray, claimed: bytearray | None) -> Iterator[Violation]:
        for page in pages:
            state, times = self.state(page), listed[page]
            if times != (state is PageState.FREE):
                yield Violation(page, f"{state.name} and {times} times in the free list", "once if free")
            # A quarantined page belongs to nobody, whatever is claimed: an earlier disagreement put it there.
            elif claimed is not None and claimed[page] != state and state not in _SETTLED:
                yield Violation(page, state.name, _STATES[claimed[page]].name)

    def _repair(self, pages: Sequence[int]) -> None:
        """Take pages out of circulation and count again, trusting nothing but the states."""
        bad = {page for page in pages if PADDING_PAGE < page < self.num_pages}
        if not pages and sum(self._counts) == self.num_pages:
            return
        # Quarantined, not freed: its owner has just turned out to be unknown, so somebody may still write it.
        for page in bad:
            self._states[page] = PageState.QUARANTINED
        inside = range(self.num_pages)
        self._free = [page for page in dict.fromkeys(self._free) if page in inside and not self._states[page]]
        for state in PageState:
            self._counts[state] = self._states.count(state)

    def _move(self, pages: Sequence[int], needed: bytes, state: PageState) -> None:
        states = self._states
        if not pages:
            return
        # All at once, by calls of C: a loop in Python costs three times as much, for each page that a request uses.
        is_inside = min(pages) >= 0 and max(pages) < self.num_pages
        found = bytes([states[page] for page in pages]) if is_inside else b""
        if not is_inside or found.translate(None, needed):
            self._refuse(pages, needed)
        # A page named twice would be in the free list twice, and go to two sequences.
        if len(set(pages)) != len(pages):
            twice = next(page for index, page in enumerate(pages) if page in pages[:index])
            raise OwnershipError(twice, "named twice", "named once")
        # Linear in the pool, which the path of every step must not be: only for adoption and quarantines.
        if PageState.FREE in found and (gone := {page for page in pages if states[page] == PageState.FREE}):
            self._free = [page for page in self._free if page not in gone]
        self._set(pages, found, state)
        if state is PageState.FREE:
            # Reversed, so that pages come off the stack in their old order: neighbours are copied in one run.
            self._free.extend(reversed(pages))

    def _refuse(self, pages: Sequence[int], needed: bytes) -> None:
        """Raises OwnershipError for the first page that is not in a needed state, if there is one."""
        for page in pages:
            is_inside = 0 <= page < self.num_pages
            if not is_inside or self._states[page] not in needed:
                found = self.state(page).name if is_inside else "not in the pool"
                raise OwnershipError(page, found, " or ".join(sorted(_STATES[one].name for one in needed)))

    def _set(self, pages: Sequence[int], before: bytes, state: PageState) -> None:
        states, counts = self._states, self._counts
        for found in set(before):
            counts[found] -= before.count(found)
        for page in pages:
            states[page] = state
        counts[state] += len(pages)
