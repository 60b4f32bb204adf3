"""What goes into a step."""

from array import array

import hypothesis.strategies as st
from hypothesis import given

from nodes.request import Sampling
from nodes.scheduler.batching import compose_step
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.step_pace import StepPace

CONFIG = SchedulerConfig(
    group="m", worker="w", agent="a", context_length=999, page_size=4, step_tokens=20, chunk_tokens=8, max_running=8
)
GREEDY = Sampling(temperature=0.0)
UNPACED = StepPace(0.0, 4)


def sequence(row: int, length: int, computed: int, *, pages: int | None = None) -> Sequence:
    one = Sequence(row, range(100, 100 + length), length, GREEDY, 0.0)
    one.max_length = length + 5
    one.num_computed = one.num_scheduled = computed
    num_pages = -(-length // 4) if pages is None else pages
    one.page_ids = array("i", range(row * 10 + 1, row * 10 + 1 + num_pages))
    one.capacity = num_pages * 4
    return one


def test_decode_rows_come_first_then_chunks() -> None:
    first, second, long, short = sequence(1, 9, 8), sequence(2, 5, 4), sequence(3, 30, 0), sequence(4, 5, 0)
    step = compose_step(CONFIG, 20, UNPACED, [first, second], [long, short])
    assert [(row.row_id, row.start, row.num_tokens, row.num_pages) for row in step.rows] == [
        (1, 8, 1, 3),
        (2, 4, 1, 2),
        (3, 0, 8, 8),
        (4, 0, 5, 2),
    ]
    assert [row.sampling for row in step.rows] == [GREEDY, GREEDY, None, GREEDY]
    assert list(step.token_ids) == [108, 104, *range(100, 108), *range(100, 105)]
    assert list(step.page_ids) == [11, 12, 13, 21, 22, *range(31, 39), 41, 42]
    assert [one.num_inflight for one in (first, second, long, short)] == [1, 1, 1, 1]
    assert (first.length, long.length, short.length) == (10, 30, 6)
    assert (first.num_unscheduled, long.num_unscheduled, short.num_unscheduled) == (1, 22, 1)


def test_a_token_that_is_not_known_yet_is_named_by_the_row_that_draws_it() -> None:
    one, two = sequence(1, 8, 7), sequence(2, 4, 0, pages=2)
    compose_step(CONFIG, 20, UNPACED, [one], [two])
    one.page_ids.append(99)
    one.capacity += 4
    step = compose_step(CONFIG, 20, UNPACED, [one, two], [])
    assert [(row.row_id, row.start, row.from_row) for row in step.rows] == [(1, 8, 0), (2, 4, 1)]
    assert list(step.token_ids) == [-1, -1]


def test_a_chunk_ends_on_a_page_unless_it_is_the_last() -> None:
    one, two, three = sequence(1, 30, 0), sequence(2, 30, 0), sequence(3, 30, 0)
    step = compose_step(CONFIG, 20, UNPACED, [], [one, two, three])
    assert [row.num_tokens for row in step.rows] == [8, 8, 4]
    step = compose_step(CONFIG, 18, UNPACED, [], [one, two, three])
    assert [row.num_tokens for row in step.rows] == [8, 8], "2 tokens are left, less than a page"


def test_budget_ends_where_it_ends() -> None:
    decoding = [sequence(row, 5, 4) for row in range(1, 6)]
    step = compose_step(CONFIG, 3, UNPACED, decoding, [sequence(9, 5, 0)])
    assert [row.row_id for row in step.rows] == [1, 2, 3]


def test_who_has_all_tokens_or_no_page_is_left_out() -> None:
    full, without = sequence(1, 5, 4), sequence(2, 8, 8)
    full.max_length = 5
    without.length = 9
    assert compose_step(CONFIG, 20, UNPACED, [full, without], []) is None


@given(
    lengths=st.lists(st.integers(2, 60), max_size=8),
    running=st.integers(0, 8),
    budget=st.integers(12, 40),
)
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
        step = compose_step(CONFIG, budget, UNPACED, decoding, left)
        assert sum(row.num_tokens for row in step.rows) <= budget
        for row in step.rows[running:]:
            one = prefilling[row.row_id - 1]
            assert row.start == seen[row.row_id]
            seen[row.row_id] += row.num_tokens
            is_last = seen[row.row_id] == one.num_tokens
            assert is_last == (row.sampling is not None)
            assert is_last or seen[row.row_id] % 4 == 0
            assert row.num_tokens <= CONFIG.chunk_tokens
        left = [one for one in left if seen[one.row_id] < one.num_tokens]
        for one in decoding:
            one.token_ids.append(1)
    assert not left


def test_prompts_get_what_the_decoding_rows_have_time_for() -> None:
    paced = StepPace(0.05, 4)
    for num_rows, num_tokens, elapsed_s in ((2, 2, 0.0205), (2, 18, 0.0605)):
        paced.took(num_rows, num_tokens, elapsed_s)
    long = sequence(3, 30, 0)
    step = compose_step(CONFIG, 20, paced, [sequence(1, 9, 8)], [long, sequence(4, 5, 0)])
    assert step is not None
    # 29.5 ms are left, 2.5 ms a token: two pages of 4, and both are the first prompt's.
    assert [row.num_tokens for row in step.rows] == [1, 8]
    step = compose_step(CONFIG, 20, paced, [], [long, sequence(5, 5, 0)])
    assert step is not None
    assert [row.num_tokens for row in step.rows] == [8, 5], "nobody decodes, so nobody is held up"
