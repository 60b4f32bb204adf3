"""Waiting sequences, and the order in which they are admitted.

The least served client's goes next (`shares.py`), whoever it is: with one client, and within each, the order is this.
Preempted sequences and failed handoffs go first, in order of arrival, whatever the policy: they were admitted before.
Of the others, every `STARVED_TURN`-th is the one that has waited longest, whatever the policy, if it has waited longer
than the starvation bound; the rest still go by the policy. So a starved sequence enters after at most `STARVED_TURN`
admissions for each one that has waited longer, and a queue so long that everything in it is starved does not turn into
first come, first served.

    fcfs            order of arrival, but what needs little goes past what needs much (`passing.py`)
    longest_prefix  most cached tokens first (SGLang's lpm)
    depth_first     by branch of the prefix tree, branches with most waiting requests first (SGLang's dfs-weight)
    shortest_first  fewest tokens left to prefill first
    priority        smallest `priority` first, as in vLLM: classes around the clients, so that within a class the least
                    served client goes next; the turns of those that starve are shared by all classes
    random          seeded

Policies that look into the cache fall back to order of arrival when more than `MAX_MATCHED` wait: matching all of them
each step would cost more than it saves. Pure; owned by the core.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace

from nodes.scheduler.config import PolicyName
from nodes.scheduler.queue.passing import Passing
from nodes.scheduler.queue.shares import Shares
from nodes.scheduler.sequence import Sequence, Share

MAX_MATCHED = 128
"""128 matches of 10,000 tokens take 35 ms (274 µs each, measured), more than a step of a small model."""
STARVED_TURN = 4
"""A quarter of the admissions: no more than that is taken from priority or short requests while others starve."""

Matcher = Callable[[Sequence], list[int]]
"""Cached pages of a waiting sequence's prefix."""


class _Turns:
    """Every `STARVED_TURN`-th of those that are admitted is the one that has waited longest."""

    def __init__(self) -> None:
        # The first starved sequence has its turn at once.
        self._num_since = STARVED_TURN - 1
        self._by_turn: set[int] = set()

    def merge(self, by_policy: Iterable[Sequence], starved: Iterable[Sequence]) -> Iterator[Sequence]:
        """Both in their order, each sequence once. Those placed by their turn are remembered for `admitted`."""
        self._by_turn.clear()
        placed: set[int] = set()
        oldest, num_since = iter(starved), self._num_since
        for sequence in by_policy:
            if num_since >= STARVED_TURN - 1:
                waiting_longest = next((other for other in oldest if other.row_id not in placed), None)
                if waiting_longest is not None:
                    placed.add(waiting_longest.row_id)
                    self._by_turn.add(waiting_longest.row_id)
                    num_since = 0
                    yield waiting_longest
            if sequence.row_id not in placed:
                placed.add(sequence.row_id)
                num_since += 1
                yield sequence

    def admitted(self, row_id: int) -> None:
        self._num_since = 0 if row_id in self._by_turn else self._num_since + 1


class _Lane:
    """What waits of one client: `front` was admitted before."""

    def __init__(self) -> None:
        self.front: dict[int, Sequence] = {}
        self.rest: dict[int, Sequence] = {}
        self.turns = _Turns()
        self.passing = Passing()

    def __len__(self) -> int:
        return len(self.front) + len(self.rest)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.front.values()
        yield from self.rest.values()

    def put_back(self, sequence: Sequence) -> None:
        self.front[sequence.row_id] = sequence
        # Sorted at each return: preemption takes the youngest first, so they come back in the wrong order.
        self.front = {sequence.row_id: sequence for sequence in sorted(self.front.values(), key=_arrival)}


class WaitingQueue:
    """Waiting sequences. `order` is what admission walks along. `running` are the sequences in steps, for `shares`."""

    def __init__(
        self,
        policy: PolicyName,
        match: Matcher,
        *,
        starvation_s: float,
        page_size: int,
        running: Iterable[Sequence] = (),
    ) -> None:
        self._policy = policy
        self._match = match
        self._starvation_s = starvation_s
        self._page_size = page_size
        # Always the same draws: a run can be replayed from its events.
        self._random = random.Random(0)
        self.shares = Shares(running)
        self._lanes: dict[Share, _Lane] = {}
        self._num_waiting = 0
        self._turns = _Turns()

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self._lanes.values():
            yield from lane

    def __contains__(self, sequence: Sequence) -> bool:
        lane = None if sequence.share is None else self._lanes.get(sequence.share)
        return lane is not None and (sequence.row_id in lane.front or sequence.row_id in lane.rest)

    def add(self, sequence: Sequence) -> None:
        lane = self._lane_of(sequence)
        lane.rest[sequence.row_id] = sequence
        lane.passing.add(sequence)
        self._num_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        """It was admitted before, and goes first of its client's."""
        self._lane_of(sequence).put_back(sequence)
        self.shares.settle(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer; harmless if it did not."""
        if (share := sequence.share) is None or (lane := self._lanes.get(share)) is None:
            return
        first = next(iter(lane.rest), -1)
        is_fresh = lane.rest.pop(sequence.row_id, None) is not None
        if is_fresh:
            lane.passing.remove(sequence, first)
        elif lane.front.pop(sequence.row_id, None) is None:
            return
        if self._policy == "priority":
            self._turns.admitted(sequence.row_id)
        elif is_fresh:
            lane.turns.admitted(sequence.row_id)
        self._num_waiting -= 1
        if not lane:
            del self._lanes[share]

    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self)

    def waiting_clients(self) -> Iterable[Share]:
        return self._lanes

    def waits_since(self, share: Share) -> float:
        """When the oldest of a client's waiting sequences arrived."""
        lane = self._lanes[share]
        return min(next(iter(some.values())).arrived_at for some in (lane.front, lane.rest) if some)

    def newest_of_heaviest(self, client: str, weight: int) -> Sequence | None:
        """Who gives up its place in a full queue for one more of `client`: the newest of whoever has most waiting, by
        weight. None if that is the client itself, or if all of the other's have begun already or were ordered.
        """
        heaviest, waiting = max(self._lanes.items(), key=lambda pair: len(pair[1]) / pair[0].weight)
        if (self.num_waiting_of(client) + 1) / max(weight, 1) >= len(waiting) / heaviest.weight:
            return None
        # A stream that has begun is not broken for one that has not, and orders are limited by themselves.
        rest = reversed(waiting.rest.values())
        return next((one for one in rest if not (one.num_prior_outputs or one.order_id)), None)

    def num_waiting_of(self, client: str) -> int:
        share = self.shares.find(client)
        return len(self._lanes.get(share, ())) if share is not None else 0

    def order(self, now: float) -> Iterable[Sequence]:
        """Who is admitted next, and after that, if those before have been admitted or are passed over."""
        if len(self._lanes) > 1:
            self.shares.refresh()
        if self._policy != "priority":
            can_match = self._num_waiting <= MAX_MATCHED
            return self._by_share([(one, self._within(lane, now, can_match)) for one, lane in self._lanes.items()])
        starved = [(one, self._starved(lane, now)) for one, lane in self._lanes.items()]
        return self._turns.merge(self._by_class(), self._by_share([pair for pair in starved if pair[1]]))

    def _within(self, lane: _Lane, now: float, can_match: bool) -> list[Sequence]:
        """The order of one client's."""
        # First come, first served starves nobody, and is nearly in order already.
        is_fcfs = self._policy == "fcfs" and lane.rest
        waiting = lane.passing.order(lane.rest) if is_fcfs else list(lane.rest.values())
        if not is_fcfs and len(waiting) > 1:
            by_policy = self._sort(waiting) if can_match or self._policy == "random" else waiting
            waiting = list(lane.turns.merge(by_policy, self._starved(lane.rest.values(), now)))
        return [*lane.front.values(), *waiting] if lane.front else waiting

    def _by_class(self) -> Iterator[Sequence]:
        classes: dict[int, dict[Share, list[Sequence]]] = {}
        for share, lane in self._lanes.items():
            for sequence in lane:
                classes.setdefault(sequence.spec.priority, {}).setdefault(share, []).append(sequence)
        for priority in sorted(classes):
            yield from self._by_share(list(classes[priority].items()))

    def _by_share(self, lanes: list[tuple[Share, list[Sequence]]]) -> Iterable[Sequence]:
        """The least served client's first, again after each one that is taken."""
        return lanes[0][1] if len(lanes) == 1 else self._take_least(lanes)

    def _take_least(self, lanes: list[tuple[Share, list[Sequence]]]) -> Iterator[Sequence]:
        # Of clients that are served alike, one of which nothing runs, then the one whose sequence has waited longest.
        heap = [
            (share.served, share.ran_at, *_arrival(waiting[0]), 0.0, 0, at) for at, (share, waiting) in enumerate(lanes)
        ]
        heapify(heap)
        while heap:
            *_, passed, index, at = heap[0]
            share, waiting = lanes[at]
            sequence = waiting[index]
            yield sequence
            index += 1
            if index == len(waiting):
                heappop(heap)
                continue
            if sequence in self:
                # Not admitted. Counted for the rest of this walk as if it were, or the others would not be looked at.
                passed += sequence.num_tokens / share.weight
            next_one = _arrival(waiting[index])
            heapreplace(heap, (share.served + passed, share.ran_at, *next_one, passed, index, at))

    def _starved(self, waiting: Iterable[Sequence], now: float) -> list[Sequence]:
        starved = [sequence for sequence in waiting if now - sequence.arrived_at >= self._starvation_s]
        return sorted(starved, key=_arrival)

    def _lane_of(self, sequence: Sequence) -> _Lane:
        share = self.shares.hold(sequence)
        if (lane := self._lanes.get(share)) is None:
            lane = self._lanes[share] = _Lane()
        return lane

    def _sort(self, waiting: list[Sequence]) -> list[Sequence]:
        policy = self._policy
        if policy == "random":
            return self._random.sample(waiting, len(waiting))
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
