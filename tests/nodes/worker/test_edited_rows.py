"""Rows with editors in a step, whatever computes it, on ranks too: they fail alone, and all is computed once."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nodes.asks import RowReads
from nodes.asks.edits import RowEdits
from nodes.request import Sampling
from nodes.worker.draw.edits import EDITOR_FAILED, NOTHING_LEFT
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep, Runner, StepOutcome
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.cuda.rank_running import in_ranks
from tests.nodes.worker.native_builds import build_all
from tests.nodes.worker.test_native_ranks import rank_of
from tests.nodes.worker.torch_running import GREEDY, make_runner, sequence_of

MODEL = "random:tiny-qwen3"
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16], [17, 18, 19]]


class Allowing:
    """Allows some ids, as far as the last token says; panics where that is `deadly`."""

    def __init__(self, deadly: int = -1, *, nothing: bool = False) -> None:
        self.deadly, self.nothing = deadly, nothing

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        del position
        if history[-1] == self.deadly:
            raise Panic("the editor is broken")
        allowed = [] if self.nothing else [(history[-1] + one) % 256 for one in (40, 41, 42)]
        edits.mask = sum(1 << one for one in allowed).to_bytes(32, "little")


class Panic(BaseException):
    """No Exception."""


def edited_step() -> RunnableStep:
    """Prompts, each drawing its first token: edited, deadly, plain, left without a candidate, and read."""
    ones = [
        sequence_of(Sampling(seed=1), 1, Allowing()),
        sequence_of(GREEDY, 1, Allowing(11)),
        sequence_of(GREEDY),
        sequence_of(GREEDY, 1, Allowing(nothing=True)),
        sequence_of(GREEDY, reads=RowReads(2)),
    ]
    rows: list[RunnableRow] = []
    tokens = array("i")
    for index, (one, prompt) in enumerate(zip(ones, PROMPTS, strict=True)):
        history = array("i", prompt) if one.editors else None
        rows.append(RunnableRow(index, one, 0, len(prompt), len(tokens), index, history=history))
        tokens.extend(prompt)
    return RunnableStep(1, Rows.of(rows), tokens, array("i", range(1, 6)))


def run_once(runner: Any) -> StepOutcome:
    """The outcome, of a step that is run and not run again row by row."""
    outcome = run_isolated(runner, edited_step())
    assert not outcome.failure
    return outcome


def assert_right(outcome: StepOutcome, runner: Any) -> None:
    logits = runner.logits(edited_step())
    assert [(error.row, error.code) for error in outcome.errors] == [(1, EDITOR_FAILED), (3, NOTHING_LEFT)]
    assert outcome.token_ids[0] in (48, 49, 50)
    assert [outcome.token_ids[i] for i in (2, 4)] == [int(logits[i].argmax()) for i in (2, 4)]
    assert [len(extra) for extra in outcome.extras] == [0, 0, 0, 0, 24]


@pytest.mark.parametrize("make", [make_runner, lambda model: make_runner(model, kernels="torch"), device_runner])
def test_editors_fail_their_rows_alone(make: Callable[[str], Runner]) -> None:
    build_all()
    runner = make(MODEL)
    assert_right(run_once(runner), runner)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_editors_fail_their_rows_alone_at_every_rank(kernels: str) -> None:
    build_all()

    def of_rank(group: Collectives) -> StepOutcome:
        runner = rank_of(MODEL, group, kernels=kernels)
        outcome = run_once(runner)
        assert_right(outcome, runner)
        return outcome

    first, second = in_ranks(2, of_rank)
    assert first == second
