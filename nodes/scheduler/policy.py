"""Who waits, and in which order they are admitted.

Preempted sequences and failed handoffs stand in front, in order of arrival, whatever the policy: they were admitted
once. So do requests that have waited longer than the starvation bound, whatever a policy thinks of them.

    fcfs            order of arrival
    longest_prefix  most cached tokens first (SGLang's lpm)
    depth_first     by branch of the prefix tree, branches with most waiting requests first (SGLang's dfs-weight)
    shortest_first  fewest tokens left to prefill first
    priority        smallest `priority` first, as in vLLM
    random          seeded

Policies that look into the cache fall back to order of arrival when more than `MAX_MATCHED` wait: matching all of them
each step would cost more than it saves. Pure; owned by the core.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator

from nodes.scheduler.config import PolicyName
from nodes.scheduler.sequence import Sequence

MAX_MATCHED = 128

Matcher = Callable[[Sequence], list[int]]
"""Cached pages of a waiting sequence's prefix."""


class WaitingQueue:
    """Waiting sequences. `order` is what admission walks along."""

    def __init__(self, policy: PolicyName, match: Matcher, *, starvation_s: float, page_size: int, seed: int) -> None:
        self._policy = policy
        self._match = match
        self._starvation_s = starvation_s
        self._page_size = page_size
        self._random = random.Random(seed)
        self._front: dict[int, Sequence] = {}
        self._queue: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._front) + len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front.values()
        yield from self._queue.values()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.row_id in self._front or sequence.row_id in self._queue

    def add(self, sequence: Sequence) -> None:
        """At the end."""
        self._queue[sequence.row_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Before everything that was never admitted."""
        self._front[sequence.row_id] = sequence
        self._front = {one.row_id: one for one in sorted(self._front.values(), key=_arrival)}

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer; harmless if it did not."""
        self._front.pop(sequence.row_id, None)
        self._queue.pop(sequence.row_id, None)

    def num_tokens(self) -> int:
        """Tokens of all that wait."""
        return sum(sequence.num_tokens for sequence in self)

    def order(self, now: float) -> list[Sequence]:
        """Everyone who waits, first to be admitted first."""
        waiting = list(self._queue.values())
        if self._policy != "fcfs" and len(waiting) > 1:
            starved = [one for one in waiting if now - one.arrived_at >= self._starvation_s]
            others = [one for one in waiting if now - one.arrived_at < self._starvation_s]
            waiting = starved + self._sort(others)
        return [*self._front.values(), *waiting]

    def _sort(self, waiting: list[Sequence]) -> list[Sequence]:
        policy = self._policy
        if policy == "priority":
            return sorted(waiting, key=lambda one: (one.priority, one.arrived_at, one.row_id))
        if policy == "random":
            return self._random.sample(waiting, len(waiting))
        if len(waiting) > MAX_MATCHED:
            return waiting
        matches = {one.row_id: self._match(one) for one in waiting}
        if policy == "longest_prefix":
            return sorted(waiting, key=lambda one: (-len(matches[one.row_id]), one.row_id))
        if policy == "shortest_first":
            return sorted(waiting, key=lambda one: (self._num_left(one, matches[one.row_id]), one.row_id))
        return _depth_first(waiting, matches)

    def _num_left(self, sequence: Sequence, pages: list[int]) -> int:
        return sequence.num_tokens - len(pages) * self._page_size


def _arrival(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrived_at, sequence.row_id


def _depth_first(waiting: list[Sequence], matches: dict[int, list[int]]) -> list[Sequence]:
    """A cached page stands for its branch; its weight is how many waiting requests go through it."""
    weights = Counter(page for pages in matches.values() for page in pages)
    # Longer than any path below it compares: a branch's own end comes after what hangs on the branch.
    end = (1, 0)

    def path(sequence: Sequence) -> tuple[list[tuple[int, int]], int]:
        return [*((-weights[page], page) for page in matches[sequence.row_id]), end], sequence.row_id

    return sorted(waiting, key=path)
