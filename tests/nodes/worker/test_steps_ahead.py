"""Steps launched ahead end in order, and what fails fails as it does without."""

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from nodes.protocol import RowError
from nodes.request import Sampling
from nodes.worker.errors import CollectiveFailed, DeviceFailed
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.executor.steps_ahead import StepsAhead
from nodes.worker.steps.step import (
    MISSING_INPUT,
    POISONED,
    PipelinedRunner,
    Rows,
    RunnableRow,
    RunnableStep,
    StepOutcome,
)
from tests.mesh.mesh_under_test import until
from tests.nodes.worker.torch_running import sequence_of


class FakeDevice:
    """Adds one to every input token. Launching 13 raises, 17 as a lost rank does; finishing 99 fails the device."""

    numerics = "fake"

    def __init__(self) -> None:
        self.drawn: dict[int, int] = {}
        self.log: list[str] = []
        self.gates: dict[int, Event] = {}

    def launch(self, step: RunnableStep) -> Any:
        inputs = []
        for row in step.rows:
            inputs.append(self.drawn[row.from_row] if row.from_row >= 0 else step.token_ids[row.token_offset])
        if 13 in inputs:
            raise MemoryError("thirteen")
        if 17 in inputs:
            raise CollectiveFailed("rank 1 is gone")
        self.log.append(f"launch {step.step}")
        self.drawn = {row.row: token + 1 for row, token in zip(step.rows, inputs, strict=True)}
        return step.step, list(self.drawn.values())

    def finish(self, launched: Any) -> StepOutcome:
        number, tokens = launched
        if number in self.gates:
            assert self.gates[number].wait(10)
        self.log.append(f"finish {number}")
        if 100 in tokens:
            raise OSError("the device is gone")
        return StepOutcome(tokens)

    def run(self, step: RunnableStep) -> StepOutcome:
        return self.finish(self.launch(step))

    def synchronize(self) -> None:
        self.log.append("synchronize")


def step(number: int, tokens: list[int], from_rows: list[int] | None = None) -> RunnableStep:
    sources = from_rows or [-1] * len(tokens)
    one, offsets = sequence_of(Sampling()), range(len(tokens))
    rows = [RunnableRow(i, one, 0, 1, i, i, 1, source) for i, source in zip(offsets, sources, strict=True)]
    return RunnableStep(number, Rows.of(rows), array("i", tokens), array("i", [1] * len(tokens)))


def run_all(device: FakeDevice, *steps: RunnableStep, release: int = 0) -> list[Any]:
    async def main() -> list[Any]:
        thread = ThreadPoolExecutor(1)
        ahead = StepsAhead(device, thread)
        order: list[int] = []

        async def one(number: int, of: RunnableStep) -> StepOutcome:
            outcome = await ahead.run(of)
            order.append(number)
            return outcome

        tasks = [asyncio.create_task(one(i, of)) for i, of in enumerate(steps)]
        if release:
            await until(lambda: f"launch {release + 1}" in device.log)
            device.gates[release].set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert order == sorted(order), "steps end in order"
        ahead.stop()
        thread.shutdown()
        return results

    return asyncio.run(main())


def test_a_step_is_launched_while_the_one_before_runs() -> None:
    device = FakeDevice()
    assert isinstance(device, PipelinedRunner)
    device.gates[1] = Event()
    outcomes = run_all(device, step(1, [5, 7]), step(2, [-1, -1], [1, 0]), release=1)
    assert [outcome.token_ids for outcome in outcomes] == [[6, 8], [9, 7]]
    assert device.log == ["launch 1", "launch 2", "finish 1", "finish 2"]


def test_a_launch_that_raises_is_run_row_by_row_with_what_was_drawn() -> None:
    device = FakeDevice()
    device.gates[3] = Event()
    steps = step(1, [12, 20]), step(2, [-1, -1], [0, 1]), step(3, [-1, -1], [0, 1]), step(4, [-1], [1])
    outcomes = run_all(device, *steps, release=3)
    assert [list(outcome.token_ids) for outcome in outcomes] == [[13, 21], [-1, 22], [-1, 23], [24]]
    assert outcomes[1].errors == [RowError(0, POISONED, "MemoryError: thirteen", retryable=False)]
    assert [(error.row, error.code) for error in outcomes[2].errors] == [(0, MISSING_INPUT)]
    assert list(outcomes[3].errors) == []
    assert ["thirteen" in outcome.failure for outcome in outcomes] == [False, True, False, False]
    assert device.log[-4:] == ["launch 3", "launch 4", "finish 3", "finish 4"], "ahead again"


def test_the_first_step_may_raise_too() -> None:
    outcomes = run_all(FakeDevice(), step(1, [13, 1]), step(2, [-1], [1]))
    assert [list(outcome.token_ids) for outcome in outcomes] == [[-1, 2], [3]]


@pytest.mark.parametrize("number", [1, 2])
def test_a_device_that_fails_is_passed_on(number: int) -> None:
    steps = [step(1, [99 if number == 1 else 1]), step(2, [99]), step(3, [1])]
    results = run_all(FakeDevice(), *steps)
    assert isinstance(results[number - 1], OSError)


def test_a_rank_that_lost_the_others_runs_no_row_again() -> None:
    device = FakeDevice()
    [result] = run_all(device, step(1, [5, 17]))
    assert isinstance(result, CollectiveFailed)
    assert device.log == []
    with pytest.raises(CollectiveFailed):
        run_isolated(FakeDevice(), step(1, [5, 17]))


class Crowded(FakeDevice):
    """Has no memory for a step while another runs; `broken`: has none at all any more."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.num_tried = 0

    def launch(self, step: RunnableStep) -> Any:
        self.num_tried += 1
        if self.broken or len(self.log) % 2:
            raise MemoryError("crowded")
        return super().launch(step)


def test_a_launch_that_raises_is_told_of_although_the_step_goes_well_the_second_time() -> None:
    device = Crowded()
    device.gates[1] = Event()

    async def main() -> list[StepOutcome]:
        thread = ThreadPoolExecutor(1)
        ahead = StepsAhead(device, thread)
        tasks = [asyncio.create_task(ahead.run(step(1, [5]))), asyncio.create_task(ahead.run(step(2, [-1], [0])))]
        # The second one is tried while the first runs, and not before the loop has heard that that was launched.
        await until(lambda: device.num_tried == 2)
        device.gates[1].set()
        outcomes = await asyncio.gather(*tasks)
        ahead.stop()
        thread.shutdown()
        return outcomes

    first, second = asyncio.run(main())
    assert (first.token_ids, first.failure) == ([6], "")
    assert (list(second.token_ids), list(second.errors)) == ([7], [])
    assert "MemoryError: crowded" in second.failure


def test_a_device_that_launches_nothing_any_more_is_no_rows_fault() -> None:
    [result] = run_all(Crowded(broken=True), step(1, [5, 6]))
    assert isinstance(result, DeviceFailed)
