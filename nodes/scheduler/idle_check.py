"""Compares the books of the cache while nothing runs, a slice at a time, and tells of pages that were quarantined.

Any event ends a pass, since it may change what has been looked at; one pass follows after all events, and no other, as
the books change by events only. Pages about which the books disagree are quarantined and found by no prompt again; it
makes no difference here whether a pass found them or a move of the allocator. Pure; owned by the core.
"""

from typing import TYPE_CHECKING, Final

from nodes.scheduler.books import Books
from nodes.scheduler.events import PagesDamaged

if TYPE_CHECKING:
    from kvstore.cache.allocator import Slices, Violation

CHECK: Final = "check"
IDLE_S: Final = 2.0
"""How long nothing has happened when a pass begins: the next request of a conversation is rarely there by then."""
SLICE_PAUSE_S: Final = 0.02
"""A slice takes a millisecond at most, so a pass takes a twentieth of the loop's time; 1,000,000 pages take 30 s."""

MAX_TOLD: Final = 8
"""Pages that a log line names: more make it no clearer."""


class IdleCheck:
    """`num_found` disagreements have been told of. `interrupt` at each event, `look` at the end of each wake."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._slices: Slices[list[Violation]] | None = None
        self._is_over = False
        # A pass waits to begin, or has begun.
        self._is_due = False
        self.num_found = 0

    def interrupt(self) -> None:
        if self._is_due or self._is_over:
            self._slices, self._is_over, self._is_due = None, False, False
            self._books.deadlines.clear((CHECK, ""))

    def look(self, *, is_idle: bool, now: float) -> None:
        """Begin when nothing has happened for `IDLE_S`, if nothing does until then."""
        if not is_idle:
            self.interrupt()
        elif not self._is_over:
            self._is_due = True
            self._books.deadlines.set_default((CHECK, ""), now + IDLE_S)

    def on_due(self, now: float) -> None:
        if self._slices is None:
            self._slices = self._books.cache.checking()
        # A slice yields nothing; the end of all of them is told by the default.
        self._is_over = next(self._slices, self._slices) is not None
        if self._is_over:
            self._slices = None
        else:
            self._books.deadlines.set((CHECK, ""), now + SLICE_PAUSE_S)

    def tell(self) -> bool:
        """Tell of pages that have been quarantined since. Whether there are any."""
        blocks = self._books.cache.blocks
        num_new = blocks.num_violations - self.num_found
        if num_new:
            self.num_found += num_new
            # The books keep the last ones only, and of those a log needs some.
            self._books.outbox.add(PagesDamaged(num_new, list(blocks.violations)[-min(num_new, MAX_TOLD) :]))
        return bool(num_new)
