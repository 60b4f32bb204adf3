"""Who goes past whom among one client's requests, first come first served otherwise: a question need not wait until
all the documents are read that were sent before it.

    what a request needs    its tokens, and twice those that it may draw, of which `MOST_OUTPUT` at most are counted
    the first in order      lets others go first, the least first, that together need a `PASSING_SHARE` of what it needs

So whoever waits is kept waiting a quarter longer at most, whatever comes behind: those before it let pass a quarter of
what they need. What needs about as much as the first, or says nothing else of its length, keeps its place. Pure.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Final

from nodes.scheduler.queue.shares import OUTPUT_COST
from nodes.scheduler.sequence import Sequence

PASSING_SHARE: Final = 4
"""A 1/4. With 2,000 tokens to compute, the first lets eight short questions pass."""
MOST_OUTPUT: Final = 256
"""Few requests say how long their answer may be, and few answers are as long as they may be."""


def needed_tokens(sequence: Sequence) -> int:
    """What is cached of it is not known without a search of 0.3 ms, too long for each that waits at each admission."""
    num_outputs = min(max(0, sequence.max_length - sequence.num_tokens), MOST_OUTPUT)
    return sequence.num_tokens + OUTPUT_COST * num_outputs


class Passing:
    """One client's waiting requests by what they need."""

    def __init__(self) -> None:
        # Kept sorted, so that an admission looks only at those that may pass: 2,048 may wait.
        self._by_need: list[tuple[int, int]] = []
        self._needs: dict[int, int] = {}
        self._first = -1
        self._num_passed = 0

    def add(self, sequence: Sequence) -> None:
        need = self._needs[sequence.row_id] = needed_tokens(sequence)
        insort(self._by_need, (need, sequence.row_id))

    def remove(self, sequence: Sequence, first: int) -> None:
        """It waits no longer; `first` was the first in order. If that is another one, it has been passed."""
        need = self._needs.pop(sequence.row_id)
        del self._by_need[bisect_left(self._by_need, (need, sequence.row_id))]
        if first != self._first:
            self._first, self._num_passed = first, 0
        if sequence.row_id != first:
            self._num_passed += need

    def order(self, waiting: Mapping[int, Sequence]) -> list[Sequence]:
        """`waiting` in order of arrival, with those in front that may pass the first of them."""
        first = next(iter(waiting))
        room = self._needs[first] // PASSING_SHARE - (self._num_passed if first == self._first else 0)
        passing: dict[int, Sequence] = {}
        for need, row_id in self._by_need:
            if need > room:
                break
            room -= need
            passing[row_id] = waiting[row_id]
        if not passing:
            return list(waiting.values())
        return [*passing.values(), *(one for row_id, one in waiting.items() if row_id not in passing)]
