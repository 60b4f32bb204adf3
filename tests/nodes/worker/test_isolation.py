"""Which of a step's rows is to blame for what it raises, and when it is the device."""

from array import array

import pytest

from nodes.protocol import RowError
from nodes.request import Sampling
from nodes.worker.errors import CollectiveFailed, DeviceFailed
from nodes.worker.executor.isolation import run_isolated, traceback_of
from nodes.worker.steps.step import POISONED, Rows, RunnableStep, StepOutcome
from tests.nodes.worker.torch_running import sequence_of


class Device:
    """Draws a row's token plus one. Raises for tokens in `deadly`, for batches if it is `crowded`, always if broken.

    Token 40 has logits that are not finite.
    """

    numerics = "fake"

    def __init__(self, *deadly: int, crowded: bool = False, broken: bool = False) -> None:
        self.deadly, self.crowded, self.broken = deadly, crowded, broken
        self.pages: list[list[int]] = []

    def run(self, step: RunnableStep) -> StepOutcome:
        self.pages.append([step.page_ids[row.page_offset] for row in step.rows])
        tokens = [step.token_ids[row.token_offset] for row in step.rows]
        if self.broken or (self.crowded and len(tokens) > 1) or set(tokens) & set(self.deadly):
            raise RuntimeError(f"no {tokens}")
        errors = [
            RowError(row.row, POISONED, "not finite") for row, t in zip(step.rows, tokens, strict=True) if t == 40
        ]
        return StepOutcome([-1 if token == 40 else token + 1 for token in tokens], errors)


def step(*tokens: int) -> RunnableStep:
    offsets = range(len(tokens))
    rows = Rows([sequence_of(Sampling())] * len(tokens), [0] * len(tokens), [1] * len(tokens), offsets, offsets)
    return RunnableStep(1, rows, array("i", tokens), array("i", range(1, len(tokens) + 1)))


def test_a_batch_that_raises_and_whose_rows_survive_alone_says_so_with_its_traceback() -> None:
    outcome = run_isolated(Device(crowded=True), step(1, 2))
    assert (outcome.token_ids, outcome.errors) == ([2, 3], [])
    assert "no [1, 2]" in outcome.failure
    assert "in run" in outcome.failure
    assert run_isolated(Device(), step(1, 2)).failure == ""


def test_only_the_guilty_row_fails_and_the_device_is_not_asked() -> None:
    device = Device(2)
    outcome = run_isolated(device, step(1, 2, 3))
    assert outcome.token_ids == [2, -1, 4]
    assert outcome.errors == [RowError(1, POISONED, "RuntimeError: no [2]", retryable=False)]
    assert device.pages == [[1, 2, 3], [1], [2], [3]]


@pytest.mark.parametrize("tokens", [(2,), (2, 2)])
def test_where_all_rows_raise_a_token_on_page_0_tells_them_from_the_device(tokens: tuple[int, ...]) -> None:
    device = Device(2)
    outcome = run_isolated(device, step(*tokens))
    assert [error.code for error in outcome.errors] == [POISONED] * len(tokens)
    assert device.pages[-1] == [0]
    with pytest.raises(DeviceFailed, match="nor a test token that belongs to no request"):
        run_isolated(Device(broken=True), step(*tokens))


def test_logits_that_are_not_finite_never_make_it_the_devices_fault() -> None:
    device = Device(2)
    outcome = run_isolated(device, step(40, 2))
    assert [error.row for error in outcome.errors] == [0, 1]
    assert [0] not in device.pages


class LostRank(Device):
    def run(self, step: RunnableStep) -> StepOutcome:
        if len(step.rows) > 1:
            raise RuntimeError("crowded")
        raise CollectiveFailed("rank 1 is gone")


def test_a_lost_rank_is_no_rows_fault() -> None:
    with pytest.raises(CollectiveFailed):
        run_isolated(LostRank(), step(1, 2))


def test_a_long_traceback_is_kept_from_its_end() -> None:
    text = traceback_of(RuntimeError("x" * 10_000 + "the end"))
    assert len(text) == 8_000
    assert text.endswith("the end\n")
