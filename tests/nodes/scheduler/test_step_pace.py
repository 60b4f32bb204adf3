"""How many prompt tokens join a step: what fits beside the decoding rows, in pages, by what steps took."""

from hypothesis import given
from hypothesis import strategies as st

from nodes.scheduler.batch.step_pace import StepPace

PAGE = 16


def measured(max_step_s: float, decode_s: float, token_s: float, rows: int = 8, steps: int = 40) -> StepPace:
    pace = StepPace(max_step_s, PAGE)
    for number in range(steps):
        tokens = 64 if number % 2 else 0
        pace.observe(rows, rows + tokens, decode_s + token_s * tokens)
    return pace


def test_nobody_is_held_up_where_nobody_decodes_nothing_was_measured_or_it_is_off() -> None:
    assert StepPace(0.1, PAGE).prompt_tokens(4) is None
    assert measured(0.1, 0.02, 0.001).prompt_tokens(0) is None
    assert measured(0.0, 0.02, 0.001).prompt_tokens(4) is None


def test_what_fits_beside_the_rows_in_pages() -> None:
    assert measured(0.1, 0.0205, 0.001).prompt_tokens(8) == 64
    assert measured(0.1, 0.5, 0.001).prompt_tokens(8) == PAGE, "prompts get on, however slow the rows are"


def test_a_hang_is_no_cost_of_tokens_and_nonsense_is_no_measurement() -> None:
    pace = measured(0.1, 0.0205, 0.001)
    for elapsed_s in (float("nan"), float("inf"), -1.0, 0.0):
        pace.observe(8, 72, elapsed_s)
    assert pace.prompt_tokens(8) == 64
    pace.observe(8, 72, 30.0)
    assert pace.prompt_tokens(8) == 32
    for _ in range(8):
        pace.observe(8, 72, 0.0845)
    assert pace.prompt_tokens(8) >= 48


@given(
    max_step_s=st.floats(0.01, 1.0),
    decode_s=st.floats(0.0001, 0.2),
    token_s=st.floats(0.00001, 0.02),
    rows=st.integers(1, 300),
)
def test_steps_last_about_as_long_as_they_may(max_step_s: float, decode_s: float, token_s: float, rows: int) -> None:
    room = measured(max_step_s, decode_s, token_s, rows).prompt_tokens(rows)
    assert room > 0
    assert room % PAGE == 0
    step_s = decode_s + room * token_s
    assert room == PAGE or step_s <= max_step_s * 1.01
    # Not less than would fit, either: another page would be too much.
    assert step_s + 1.01 * PAGE * token_s >= max_step_s * 0.99
