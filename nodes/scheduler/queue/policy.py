"""Waiting sequences, and the order in which they are admitted.

Preempted sequences and failed handoffs go first, in order of arrival, whatever the policy: they were admitted before.
Of the others, every `STARVED_TURN`-th is the one that has waited longest, whatever the policy, if it has waited longer
than the starvation bound; the rest still go by the policy. So a starved sequence enters after at most `STARVED_TURN`
admissions for each one that has waited longer, and a queue so long that everything in it is starved does not turn into
first come, first served.

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
"""128 matches of 10,000 tokens take 35 ms (274 µs each, measured), more than a step of a small model."""
STARVED_TURN = 4
"""A quarter of the admissions: no more than that is taken from priority or short requests while others starve."""

Matcher = Callable[[Sequence], list[int]]
"""Cached pages of a waiting sequence's prefix."""


class WaitingQueue:
    """Waiting sequences. `order` is what admission walks along."""

    def __init__(self, policy: PolicyName, match: Matcher, *, starvation_s: float, page_size: int) -> None:
        self._policy = policy
        self._match = match
        self._starvation_s = starvation_s
        self._page_size = page_size
        # Always the same draws: a run can be replayed from its events.
        self._random = random.Random(0)
        self._front: dict[int, Sequence] = {}
        self._queue: dict[int, Sequence] = {}
        # The first starved sequence has its turn at once.
        self._num_since_turn = STARVED_TURN - 1
        self._by_turn: set[int] = set()

    def __len__(self) -> int:
        return len(self._front) + len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front.values()
        yield from self._queue.values()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.row_id in self._front or sequence.row_id in self._queue

    def add(self, sequence: Sequence) -> None:
        self._queue[sequence.row_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        self._front[sequence.row_id] = sequence
        # Sorted at each return: preemption takes the youngest first, so they come back in the wrong order.
        self._front = {sequence.row_id: sequence for sequence in sorted(self._front.values(), key=_arrival)}

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer; harmless if it did not."""
        self._front.pop(sequence.row_id, None)
        if self._queue.pop(sequence.row_id, None) is not None:
            self._num_since_turn = 0 if sequence.row_id in self._by_turn else self._num_since_turn + 1

    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self)

    def order(self, now: float) -> list[Sequence]:
        waiting = list(self._queue.values())
        # First come, first served starves nobody, and is in order already.
        if self._policy != "fcfs" and len(waiting) > 1:
            starved = [sequence for sequence in waiting if now - sequence.arrived_at >= self._starvation_s]
            waiting = self._take_turns(self._sort(waiting), sorted(starved, key=_arrival))
        return [*self._front.values(), *waiting]

    def _take_turns(self, by_policy: list[Sequence], starved: list[Sequence]) -> list[Sequence]:
        """Merge both lists, each sequence once. Those placed by their turn are remembered for `remove`."""
        self._by_turn.clear()
        ordered: dict[int, Sequence] = {}
        oldest = iter(starved)
        num_since = self._num_since_turn
        for sequence in by_policy:
            if num_since >= STARVED_TURN - 1:
                waiting_longest = next((other for other in oldest if other.row_id not in ordered), None)
                if waiting_longest is not None:
                    ordered[waiting_longest.row_id] = waiting_longest
                    self._by_turn.add(waiting_longest.row_id)
                    num_since = 0
            if sequence.row_id not in ordered:
                ordered[sequence.row_id] = sequence
                num_since += 1
        return list(ordered.values())

    def _sort(self, waiting: list[Sequence]) -> list[Sequence]:
        policy = self._policy
        if policy == "priority":
            return sorted(waiting, key=lambda one: (one.spec.priority, one.arrived_at, one.row_id))
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
    # Sorts after any page: a path that ends on a branch comes after those that go on below it.
    end = (1, 0)

    def path(sequence: Sequence) -> tuple[list[tuple[int, int]], int]:
        return [*((-weights[page], page) for page in matches[sequence.row_id]), end], sequence.row_id

    return sorted(waiting, key=path)
