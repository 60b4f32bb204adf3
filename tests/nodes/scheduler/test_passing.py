"""What needs little goes past what needs much of its own client, and nobody waits much longer for it."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.request import RequestSpec, Sampling
from nodes.scheduler.queue.passing import MOST_OUTPUT, PASSING_SHARE, Passing, needed_tokens
from nodes.scheduler.queue.policy import WaitingQueue
from nodes.scheduler.sequence import Sequence
from tests.nodes.scheduler.scheduler_world import NO_STOP, prompt, started


def queue() -> WaitingQueue:
    return WaitingQueue("fcfs", lambda _: [], starvation_s=5.0, page_size=4)


def sequence(row: int, length: int, *, num_outputs: int = 1, client: str = "") -> Sequence:
    one = Sequence(row, range(length), length, RequestSpec(Sampling(), NO_STOP, client=client), float(row))
    one.max_length = length + num_outputs
    return one


def rows(waiting: WaitingQueue) -> list[int]:
    return [one.row_id for one in waiting.order(0.0)]


def test_a_short_one_goes_first_and_few_of_them_do() -> None:
    waiting = queue()
    for row in range(64):
        waiting.add(sequence(row, 2000))
    for row in range(64, 80):
        waiting.add(sequence(row, 98 - row % 2))
    # Of 2,002 tokens a quarter: five of 99 or 100, the least of them first.
    assert rows(waiting)[:7] == [65, 67, 69, 71, 73, 0, 1]
    for one in list(waiting.order(0.0))[:5]:
        waiting.remove(one)
    assert rows(waiting)[0] == 0, "it has let pass what it may"
    waiting.remove(next(iter(waiting.order(0.0))))
    assert rows(waiting)[:7] == [75, 77, 79, 64, 66, 1, 2]


def test_what_is_alike_or_says_nothing_of_its_length_is_served_in_order() -> None:
    waiting = queue()
    for row, length in enumerate([100, 90, 60, 40, 30]):
        waiting.add(sequence(row, length))
    assert rows(waiting) == [0, 1, 2, 3, 4]
    waiting = queue()
    for row, length in enumerate([900, 50, 1900, 10]):
        waiting.add(sequence(row, length, num_outputs=2048 - length))
    assert needed_tokens(sequence(0, 10, num_outputs=10_000)) == 10 + 2 * MOST_OUTPUT
    assert rows(waiting) == [0, 1, 2, 3]


def test_few_tokens_of_output_are_little_too() -> None:
    """One question behind samples whose prompt is as short."""
    waiting = queue()
    for row in range(128):
        waiting.add(sequence(row, 20, num_outputs=200))
    waiting.add(sequence(128, 25, num_outputs=5))
    assert rows(waiting)[:2] == [128, 0]


def test_clients_are_not_mixed_up() -> None:
    waiting = queue()
    waiting.add(sequence(0, 4000, client="a"))
    waiting.add(sequence(1, 1000, client="b"))
    waiting.add(sequence(2, 10, client="a"))
    assert rows(waiting) == [1, 2, 0], "of clients that were served alike, the one whose next has waited longest"


ADD = st.tuples(st.just("add"), st.integers(1, 400))
LEAVE = st.tuples(st.sampled_from(["admit", "cancel"]), st.integers(0, 9))
EVENTS = st.lists(ADD | LEAVE, max_size=80)


def check_nobody_waits_much_longer(events: list[tuple[str, int]]) -> None:
    """What goes past a request needs a quarter, at most, of what it needs with all that came before it."""
    waiting, passed, needs = queue(), dict[int, int](), list[int]()
    for name, number in events:
        here = list(waiting.order(0.0))
        if name == "add":
            one = sequence(len(needs), number)
            needs.append(needed_tokens(one))
            passed[one.row_id] = 0
            waiting.add(one)
        elif name == "admit" and here:
            waiting.remove(first := here[0])
            for row in passed:
                passed[row] += needs[first.row_id] * (row < first.row_id)
            del passed[first.row_id]
        elif name == "cancel" and here:
            waiting.remove(gone := here[number % len(here)])
            del passed[gone.row_id]
        for row, num in passed.items():
            assert num <= sum(needs[: row + 1]) / PASSING_SHARE
        assert sorted(passed) == sorted(rows(waiting)), "each once"


@given(EVENTS)
def test_nobody_waits_much_longer(events: list[tuple[str, int]]) -> None:
    check_nobody_waits_much_longer(events)


def test_a_planted_bug_is_seen() -> None:
    """What has passed is not counted."""

    def remove(self: Passing, one: Sequence, _first: int) -> None:
        self._by_need.remove((self._needs.pop(one.row_id), one.row_id))

    many: list[tuple[str, int]] = [("add", 400), *[("add", 10), ("admit", 0)] * 20]
    check_nobody_waits_much_longer(many)
    with patch.object(Passing, "remove", remove), pytest.raises(AssertionError):
        check_nobody_waits_much_longer(many)


def test_in_a_batch_of_long_prompts_a_short_one_is_answered_soon() -> None:
    world = started(num_pages={"m": 4000}, max_running=28, context_length=300)
    long = [world.submit(prompt(250, base), "m", max_tokens=2, ignore_eos=True) for base in range(30)]
    for _ in range(10):
        world.step()
    short = world.submit(prompt(8, 500), "m", max_tokens=2, ignore_eos=True)
    for _ in range(1000):
        if short.is_over:
            break
        world.step()
    assert sum(one.is_over for one in long) < 8
    world.settle()
    world.check()
