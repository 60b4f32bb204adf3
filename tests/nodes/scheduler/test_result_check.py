"""What can be the answer to a step, and what cannot."""

import math
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import FrameRefused
from nodes.protocol import RowError, StepResult
from nodes.protocol.steps import MAX_EXTRA_BYTES
from nodes.roles import NODE_CODEC
from nodes.scheduler.batch.step import Step
from nodes.scheduler.worker_link.result_check import find_problem

VOCAB = 100
# Two rows that draw, and one chunk of a prompt that does not.
STEP = Step(array("i", [0, 1, 3, 1, 1, 0, 1, 1, 2, 0, 4, 0, 0, 1, 2, 3, 8, 1, 1, 0, 3]), [], array("i"), array("i"), [])
DECODE = STEP._replace(rows=STEP.rows[:7] + STEP.rows[14:])


def problem(token_ids: list[int], *failed: int, vocab_size: int = VOCAB) -> str:
    errors = [RowError(row, "poisoned_request", "it raised") for row in failed]
    return find_problem(STEP, StepResult(scheduler_epoch=5, step=7, token_ids=token_ids, errors=errors), vocab_size)


def test_what_is_an_answer() -> None:
    assert not problem([0, -1, VOCAB - 1])
    assert not problem([-1, -1, 6], 0)
    assert not problem([-1, -1, -1], 0, 1, 2)
    assert not problem([-7, 2**63, 2**64 - 1], 0, 1, 2), "nobody looks at tokens of rows that failed"
    assert not problem([5, -1, 2**31 - 2], vocab_size=0)


@pytest.mark.parametrize(
    ("token_ids", "failed", "words"),
    [
        ([], (), "has 3 rows and was answered with 0 tokens"),
        ([5, -1], (), "has 3 rows and was answered with 2 tokens"),
        ([5, -1, 6, -1], (), "has 3 rows and was answered with 4 tokens"),
        ([5, -1, VOCAB], (), "row 2 of step 7 was answered with token 100, not one of 0..99"),
        ([5, -1, -1], (), "row 2 of step 7 was answered with token -1"),
        ([-2, -1, 6], (), "row 0 of step 7 was answered with token -2"),
        ([2**31, -1, 6], (), "row 0"),
        ([2**64 - 1, -1, 6], (), "row 0"),
        ([-(2**63), -1, 6], (), "row 0"),
        ([5, 0, 6], (), "row 1 of step 7 asked for no token and was answered with 0"),
        ([5, -2, 6], (), "row 1 of step 7 asked for no token"),
        ([5, -1, 6], (3,), "errors for rows [3]"),
        ([5, -1, 6], (-1,), "errors for rows [-1]"),
        ([5, -1, VOCAB], (0, 1), "row 2"),
    ],
)
def test_what_is_none(token_ids: list[int], failed: tuple[int, ...], words: str) -> None:
    assert words in problem(token_ids, *failed)


def test_where_all_rows_draw_all_have_drawn() -> None:
    def found(*token_ids: int) -> str:
        return find_problem(DECODE, StepResult(scheduler_epoch=5, step=7, token_ids=list(token_ids)), VOCAB)

    assert not found(0, VOCAB - 1)
    assert "row 1 of step 7 was answered with token -1" in found(5, -1)
    assert "row 0 of step 7 was answered with token 100" in found(VOCAB, 5)


def test_what_goes_beside_the_tokens_is_one_value_for_each_row_and_not_too_long() -> None:
    def found(*extras: bytes) -> str:
        tokens = [5, -1, 6]
        return find_problem(STEP, StepResult(scheduler_epoch=5, step=7, token_ids=tokens, extras=list(extras)), VOCAB)

    assert not found(b"a", b"", b"x" * MAX_EXTRA_BYTES)
    assert "answered with 2 values" in found(b"a", b"b")
    assert f"up to {MAX_EXTRA_BYTES + 1} bytes" in found(b"", b"", b"x" * (MAX_EXTRA_BYTES + 1))


@pytest.mark.parametrize("vocab_size", [0, 2**40, 2**63])
def test_an_id_that_passes_fits_a_sequence_whatever_the_worker_says_its_vocabulary_is(vocab_size: int) -> None:
    assert problem([2**31 - 1, -1, 5], vocab_size=vocab_size)
    assert array("i", [2**31 - 2])
    assert not problem([2**31 - 2, -1, 5], vocab_size=vocab_size)


def test_a_vocabulary_that_is_none_has_no_ids() -> None:
    assert problem([0, -1, 0], vocab_size=-5)


@given(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=5), st.lists(st.integers(-3, 4), max_size=4))
def test_only_what_can_be_used_passes(token_ids: list[int], failed: list[int]) -> None:
    if problem(token_ids, *failed):
        return
    assert len(token_ids) == 3
    assert all(0 <= row < 3 for row in failed)
    assert all(0 <= token_ids[row] < VOCAB for row in (0, 2) if row not in failed)
    assert token_ids[1] == -1 or 1 in failed


@pytest.mark.parametrize(
    "fields",
    [
        [5, 7, [math.nan, -1, 6]],
        [5, 7, ["5", -1, 6]],
        [5, 7, [None, -1, 6]],
        [5, 7, [1.5, -1, 6]],
        [5, 7, {"0": 5}],
        [5, 7.5, [5, -1, 6]],
        ["5", 7, [5, -1, 6]],
        [5, 7, [5, -1, 6], [["0", "code", "message"]]],
        [5, 7, [5, -1, 6], [[0, "code"]]],
        [5, 7],
    ],
)
def test_other_types_do_not_get_past_the_codec(fields: list[object]) -> None:
    """The frame is refused and counted where it arrives; to the scheduler it is an answer that is lost."""
    with pytest.raises(FrameRefused):
        NODE_CODEC.decode(msgspec.msgpack.encode(["StepResult", *fields]))
