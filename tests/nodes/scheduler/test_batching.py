"""What goes into a step."""

from array import array

import hypothesis.strategies as st
from hypothesis import given

from nodes.protocol.steps import ROW_WIDTH, RowColumn
from nodes.request import RequestSpec, Sampling
from nodes.scheduler.batch.batching import compose_step
from nodes.scheduler.batch.growth import GrowthEstimate
from nodes.scheduler.batch.running import Running
from nodes.scheduler.batch.step import Step
from nodes.scheduler.batch.step_pace import StepPace
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence
from tests.nodes.scheduler.scheduler_world import NO_STOP

CONFIG = SchedulerConfig(
    group="m", worker="w", agent="a", context_length=999, page_size=4, step_tokens=20, chunk_tokens=8, max_running=8
)
GREEDY = Sampling(temperature=0.0)
UNPACED = StepPace(0.0, 4)


def sequence(row: int, length: int, computed: int, *, pages: int | None = None) -> Sequence:
    one = Sequence(row, range(100, 100 + length), length, RequestSpec(GREEDY, NO_STOP), 0.0)
    one.max_length = length + 5
    one.num_computed = one.num_scheduled = computed
    num_pages = -(-length // 4) if pages is None else pages
    one.page_ids = array("i", range(row * 10 + 1, row * 10 + 1 + num_pages))
    one.capacity = num_pages * 4
    one.slot = row + 40
    return one


def rows_of(step: Step) -> list[tuple[int, ...]]:
    assert {len(step.rows)} == {len(step.sequences) * ROW_WIDTH}
    return [tuple(step.rows[at : at + ROW_WIDTH]) for at in range(0, len(step.rows), ROW_WIDTH)]


def test_decode_rows_come_first_then_chunks() -> None:
    first, second, long, short = sequence(1, 9, 8), sequence(2, 5, 4), sequence(3, 30, 0), sequence(4, 5, 0)
    step = compose_step(CONFIG, 20, UNPACED, [first, second], [long, short], 1)
    assert rows_of(step) == [
        (41, 1, 8, 1, 1, 0, 3),
        (42, 2, 4, 1, 1, 0, 2),
        (43, 3, 0, 8, 0, 0, 8),
        (44, 4, 0, 5, 1, 0, 2),
    ]
    assert step.opens == [one.opening() for one in (first, second, long, short)]
    assert [(one.slot, one.sequence, one.num_prompt_tokens, one.sampling) for one in step.opens[:1]] == [
        (41, 1, 9, GREEDY)
    ]
    assert list(step.token_ids) == [108, 104, *range(100, 108), *range(100, 105)]
    assert list(step.page_ids) == [11, 12, 13, 21, 22, *range(31, 39), 41, 42]
    assert [one.num_inflight for one in (first, second, long, short)] == [1, 1, 1, 1]
    assert (first.length, long.length, short.length) == (10, 30, 6)
    assert (first.num_unscheduled, long.num_unscheduled, short.num_unscheduled) == (1, 22, 1)


def test_what_the_worker_knows_is_not_said_again_but_to_another_table() -> None:
    one, two = sequence(1, 8, 7), sequence(2, 4, 0, pages=2)
    compose_step(CONFIG, 20, UNPACED, [one], [two], 1)
    one.page_ids.append(99)
    one.capacity += 4
    step = compose_step(CONFIG, 20, UNPACED, [one, two], [], 1)
    assert rows_of(step) == [(41, 1, 8, 1, 1, 2, 1), (42, 2, 4, 1, 1, 2, 0)]
    assert (list(step.token_ids), list(step.page_ids), step.opens) == ([-1, -1], [99], [])
    step = compose_step(CONFIG, 20, UNPACED, [one, two], [], 2)
    assert rows_of(step) == [(41, 1, 9, 1, 1, 0, 3), (42, 2, 5, 1, 1, 0, 2)]
    assert (list(step.page_ids), len(step.opens)) == ([11, 12, 99, 21, 22], 2)


def test_a_step_is_encoded_anew_with_what_it_had_when_it_was_composed() -> None:
    one, two = sequence(1, 8, 7), sequence(2, 4, 0, pages=2)
    first = compose_step(CONFIG, 20, UNPACED, [one], [two], 1)
    one.page_ids.append(99)
    one.capacity += 4
    second = compose_step(CONFIG, 20, UNPACED, [one, two], [], 1)
    one.page_ids.append(98)
    again, then = first.opened_in(2), second.opened_in(2)
    assert again == first
    assert then == second, "the first of the two has opened them"
    alone = second.opened_in(3)
    assert rows_of(alone) == [(41, 1, 8, 1, 1, 0, 3), (42, 2, 4, 1, 1, 0, 2)]
    assert (list(alone.page_ids), len(alone.opens)) == ([11, 12, 99, 21, 22], 2)
    assert list(alone.filled_in({1: 7, 2: -1}).token_ids) == [7, 0]
    assert list(alone.token_ids) == [-1, -1], "what is lent does not change"


def test_a_chunk_ends_on_a_page_unless_it_is_the_last() -> None:
    one, two, three = sequence(1, 30, 0), sequence(2, 30, 0), sequence(3, 30, 0)
    step = compose_step(CONFIG, 20, UNPACED, [], [one, two, three], 1)
    assert list(step.column(RowColumn.COUNT)) == [8, 8, 4]
    step = compose_step(CONFIG, 18, UNPACED, [], [one, two, three], 1)
    assert list(step.column(RowColumn.COUNT)) == [8, 8], "2 tokens are left, less than a page"


def test_budget_ends_where_it_ends() -> None:
    decoding = [sequence(row, 5, 4) for row in range(1, 6)]
    step = compose_step(CONFIG, 3, UNPACED, decoding, [sequence(9, 5, 0)], 1)
    assert list(step.column(RowColumn.SEQUENCE)) == [1, 2, 3]


def test_who_has_all_tokens_or_no_page_is_left_out() -> None:
    full, without = sequence(1, 5, 4), sequence(2, 8, 8)
    full.max_length = 5
    without.length = 9
    assert compose_step(CONFIG, 20, UNPACED, [full, without], [], 1) is None


@given(lengths=st.lists(st.integers(2, 60), max_size=8), running=st.integers(0, 8), budget=st.integers(12, 40))
def test_every_prompt_is_computed_once_and_in_order(lengths, running, budget) -> None:
    decoding = [sequence(100 + row, 5, 4, pages=80) for row in range(running)]
    for one in decoding:
        one.max_length = 300
    prefilling = [sequence(row, length, 0) for row, length in enumerate(lengths, 1)]
    seen = {one.row_id: 0 for one in prefilling}
    left = list(prefilling)
    for _ in range(200):
        if not left:
            break
        step = compose_step(CONFIG, budget, UNPACED, decoding, left, 1)
        assert len(step.token_ids) == sum(step.column(RowColumn.COUNT)) <= budget
        for _, number, start, count, draws, _, _ in rows_of(step)[running:]:
            one = prefilling[number - 1]
            assert start == seen[number]
            seen[number] += count
            is_last = seen[number] == one.num_tokens
            assert is_last == draws
            assert is_last or seen[number] % 4 == 0
            assert count <= CONFIG.chunk_tokens
        left = [one for one in left if seen[one.row_id] < one.num_tokens]
        for one in decoding:
            one.token_ids.append(1)
    assert not left


def test_prompts_get_what_the_decoding_rows_have_time_for() -> None:
    paced = StepPace(0.05, 4)
    for num_rows, num_tokens, elapsed_s in ((2, 2, 0.0205), (2, 18, 0.0605)):
        paced.observe(num_rows, num_tokens, elapsed_s)
    long = sequence(3, 30, 0)
    step = compose_step(CONFIG, 20, paced, [sequence(1, 9, 8)], [long, sequence(4, 5, 0)], 1)
    # 29.5 ms are left, 2.5 ms a token: two pages of 4, and both are the first prompt's.
    assert list(step.column(RowColumn.COUNT)) == [1, 8]
    step = compose_step(CONFIG, 20, paced, [], [long, sequence(5, 5, 0)], 1)
    assert list(step.column(RowColumn.COUNT)) == [8, 5], "nobody decodes, so nobody is held up"


def test_who_is_kept_for_a_copy_has_its_slot_until_no_step_of_it_is_under_way() -> None:
    running = Running(4, GrowthEstimate(4))
    for one in (sequence(1, 9, 8), sequence(2, 9, 8)):
        running.enter(one)
        one.num_inflight = 2 - one.row_id
        running.retain(one)
        assert (one.slot >= 0) == (one.num_inflight > 0)
    assert len(running) == 0
