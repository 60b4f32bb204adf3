"""Order of waiting requests under each policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.request import RequestSpec, Sampling
from nodes.scheduler.queue.policy import MAX_MATCHED, STARVED_TURN, WaitingQueue
from nodes.scheduler.sequence import Sequence
from tests.nodes.scheduler.scheduler_world import NO_STOP

PAGES = {1: [10, 11], 2: [], 3: [10], 4: [20], 5: [10, 12], 6: [10, 11, 13]}


def queue(policy: str, **settings) -> WaitingQueue:
    return WaitingQueue(
        policy, lambda sequence: PAGES.get(sequence.row_id, []), **{"starvation_s": 5.0, "page_size": 4, **settings}
    )


def sequence(row: int, *, length: int = 20, arrived_at: float = 0.0, priority: int = 0) -> Sequence:
    return Sequence(row, range(length), length, RequestSpec(Sampling(), NO_STOP, priority), arrived_at)


def rows(waiting: WaitingQueue, now: float = 0.0) -> list[int]:
    return [one.row_id for one in waiting.order(now)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", [1, 2, 3, 4, 5, 6]),
        ("longest_prefix", [6, 1, 5, 3, 4, 2]),
        # The branch of page 10 weighs 4, of it page 11 twice; a branch's own end comes after what hangs on it.
        ("depth_first", [6, 1, 5, 3, 4, 2]),
        ("shortest_first", [6, 5, 4, 3, 1, 2]),
        ("priority", [2, 4, 6, 1, 3, 5]),
    ],
)
def test_order(policy, expected) -> None:
    waiting = queue(policy)
    for row in range(1, 7):
        waiting.add(sequence(row, length=40 - 4 * row, priority=row % 2))
    assert rows(waiting) == expected
    assert len(waiting) == 6
    assert waiting.num_tokens() == sum(40 - 4 * row for row in range(1, 7))


def test_random_is_seeded() -> None:
    orders = []
    for _ in range(2):
        waiting = queue("random")
        for row in range(1, 7):
            waiting.add(sequence(row))
        orders.append(rows(waiting))
    assert orders[0] == orders[1] != sorted(orders[0]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("policy", ["fcfs", "shortest_first"])
def test_who_was_admitted_before_stands_in_front(policy) -> None:
    waiting = queue(policy)
    waiting.add(sequence(1, length=4))
    late, early = sequence(5, arrived_at=2.0), sequence(4, arrived_at=1.0)
    waiting.put_back(late)
    waiting.put_back(early)
    assert rows(waiting, 3.0) == [4, 5, 1]
    assert [one.row_id for one in waiting] == [4, 5, 1]
    assert early in waiting
    waiting.remove(early)
    waiting.remove(early)
    assert early not in waiting
    assert rows(waiting, 3.0) == [5, 1]


def test_nobody_starves() -> None:
    waiting = queue("shortest_first")
    waiting.add(sequence(1, length=40, arrived_at=0.0))
    waiting.add(sequence(2, length=8, arrived_at=4.0))
    waiting.add(sequence(3, length=4, arrived_at=4.0))
    assert rows(waiting, 4.0) == [3, 2, 1]
    assert rows(waiting, 5.0) == [1, 3, 2]


def admitted(waiting: WaitingQueue, now: float, number: int) -> list[int]:
    """Whom one admission at a time lets in, the queue looked at anew for each."""
    found: list[int] = []
    for _ in range(number):
        first = next(iter(waiting.order(now)))
        waiting.remove(first)
        found.append(first.row_id)
    return found


def test_a_policy_goes_on_while_everybody_starves() -> None:
    """Longer than the bound everybody waits under load; the shortest went in as they had come."""
    waiting = queue("shortest_first")
    for row in range(11, 23):
        waiting.add(sequence(row, length=100 - row, arrived_at=row / 100))
    expected = [11, 22, 21, 20, 12, 19, 18, 17, 13, 16, 15, 14]
    assert rows(waiting, 60.0) == expected
    assert admitted(waiting, 60.0, 12) == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_whoever_starves_goes_in_after_a_bounded_number_of_others(lengths: list[int]) -> None:
    """However many that the policy prefers come meanwhile."""
    waiting = queue("shortest_first")
    for row, length in enumerate(lengths, 1):
        waiting.add(sequence(row, length=100 + length, arrived_at=row / 100))
    order: list[int] = []
    for extra in range(1000, 1000 + STARVED_TURN * len(lengths)):
        waiting.add(sequence(extra, length=1, arrived_at=100.0))
        order += admitted(waiting, 100.0, 1)
    for row in range(1, len(lengths) + 1):
        assert order.index(row) < STARVED_TURN * row


def test_a_long_queue_is_not_matched() -> None:
    waiting = queue("longest_prefix")
    for row in range(MAX_MATCHED + 1, 0, -1):
        waiting.add(sequence(row))
    assert rows(waiting)[:2] == [MAX_MATCHED + 1, MAX_MATCHED]
