"""Plans of several steps: taken apart they are what the same steps would be that came one by one."""

from array import array
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.transport.base import Buffer
from nodes.protocol import StepPlan, StepResult
from nodes.protocol.steps import MAX_STEPS, ROW_WIDTH, RowColumn
from nodes.worker.core import RunStep, SendResult, StepArrived, StepRefused, WorkerCore
from nodes.worker.steps.consecutive import taken_apart
from tests.nodes.step_plans import Row, plan_of
from tests.nodes.worker.test_core import LIMITS, adopted, arrived, done, ran, rows_of

ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=5)
"""Of each row where it starts, and how many pages it brings."""


def several(step: int, rows: list[Row], num_steps: int) -> StepArrived:
    plan, buffers = plan_of(step, rows, num_steps=num_steps)
    return StepArrived("s", plan, buffers)


def numbers(buffers: Sequence[Buffer], of: RowColumn) -> list[int]:
    return memoryview(buffers[0]).cast("B").cast("i").tolist()[of::ROW_WIDTH]


@given(ROWS, st.integers(2, MAX_STEPS))
def test_each_further_step_is_a_position_on_and_brings_nothing(rows: list[tuple[int, int]], num_steps: int) -> None:
    written = [
        Row(slot + 1, [3], tuple(range(1, count + 1)), start, slot=slot, opens=not start)
        for slot, (start, count) in enumerate(rows)
    ]
    plan, buffers = plan_of(7, written, num_steps=num_steps)
    steps = taken_apart(plan, buffers)
    assert steps is not None
    assert [one.step for one, _ in steps] == list(range(7, 7 + num_steps))
    assert steps[0] == (msgspec.structs.replace(plan, num_steps=1), buffers)
    for number, (one, its) in enumerate(steps[1:], 1):
        assert (one.num_steps, one.opens, one.timeout_s) == (1, [], plan.timeout_s)
        assert numbers(its, RowColumn.START) == [start + number for start, _ in rows]
        assert numbers(its, RowColumn.FIRST_PAGE) == [count for _, count in rows]
        assert numbers(its, RowColumn.NUM_PAGES) == [0] * len(rows)
        for column in (RowColumn.SLOT, RowColumn.SEQUENCE, RowColumn.COUNT, RowColumn.DRAWS):
            assert numbers(its, column) == numbers(buffers, column)
        assert memoryview(its[1]).cast("B").cast("i").tolist() == [-1] * len(rows)
        assert not len(its[2])


def bad_plans() -> list[tuple[StepPlan, Sequence[Buffer]]]:
    one = [Row(1, [3], (1,))]
    largest = array("i", [0, 1, 2**31 - MAX_STEPS, 1, 1, 0, 0]).tobytes()
    pages = array("i", [0, 1, 1, 1, 1, 2**31 - 1, 1]).tobytes()
    plan, buffers = plan_of(1, one, num_steps=2)
    return [
        plan_of(1, one, num_steps=0),
        plan_of(1, one, num_steps=-1),
        plan_of(1, one, num_steps=MAX_STEPS + 1),
        plan_of(1, [], num_steps=2),
        plan_of(1, [Row(1, [3, 4], (1,))], num_steps=2),
        plan_of(1, [Row(1, [3], (1,), sampling=None)], num_steps=2),
        (plan, buffers[:2]),
        (plan, [buffers[0][:-1], *buffers[1:]]),
        (plan, [largest, *buffers[1:]]),
        (plan, [pages, *buffers[1:]]),
    ]


@pytest.mark.parametrize("case", range(len(bad_plans())))
def test_what_is_no_batch_that_decodes_is_refused_as_a_whole(case: int) -> None:
    plan, buffers = bad_plans()[case]
    assert taken_apart(plan, buffers) is None
    core = adopted()
    assert core.handle(StepArrived("s", plan, buffers)) == [StepRefused(1, "bad_plan")]
    assert ran(core.handle(arrived(1))) == [1], "and the step itself may still come"


def outcomes(core: WorkerCore, events: list[StepArrived], num_rows: int) -> tuple[list[object], list[StepResult]]:
    """What runs, and what is answered, if every step draws its number."""
    begun: list[object] = []
    answered: list[StepResult] = []
    for event in events:
        commands = core.handle(event)
        while commands:
            command = commands.pop(0)
            if isinstance(command, RunStep):
                step = command.runnable
                begun.append(
                    (step.step, [(row[0], *row[2:]) for row in step.rows], list(step.token_ids), list(step.page_ids))
                )
                commands += core.handle(done(*[step.step] * num_rows))
            elif isinstance(command, SendResult):
                answered.append(command.result)
    return begun, answered


def test_several_are_run_and_answered_as_the_same_steps_one_by_one() -> None:
    first = rows_of({"pages": (1, 2)}, {"pages": (3, 4)})
    later = [
        [Row(row.sequence, [-1], (), number, slot=row.slot, first_page=2, opens=False) for row in first]
        for number in range(1, 5)
    ]
    alone = outcomes(adopted(), [arrived(1, rows=first), *(arrived(2 + n, rows=one) for n, one in enumerate(later))], 2)
    together = outcomes(adopted(), [several(1, first, 5)], 2)
    assert together == alone
    assert [step for step, *_ in together[0]] == [1, 2, 3, 4, 5]


def test_only_a_result_that_another_one_follows_may_wait() -> None:
    core = adopted()
    core.handle(several(1, rows_of({}), 3))
    waits = [command.may_wait for _ in range(3) for command in core.handle(done(4)) if isinstance(command, SendResult)]
    assert waits == [False, True, False], "what a row that has just been opened draws is waited for by a client"
    core.handle(several(4, rows_of({"opens": False}), 3))
    waits = [command.may_wait for _ in range(3) for command in core.handle(done(4)) if isinstance(command, SendResult)]
    assert waits == [True, True, False]
    again = [core.handle(arrived(step)) for step in (1, 2, 3)]
    assert [one[0].may_wait for one in again] == [False] * 3, "what is asked for again is answered at once"


def test_a_plan_that_comes_twice_runs_once() -> None:
    core = adopted()
    assert ran(core.handle(several(1, rows_of({}), 3))) == [1]
    assert core.handle(several(1, rows_of({}), 3)) == []
    assert ran(core.handle(done(4))) == [2]
    (answered,) = [one for one in core.handle(several(1, rows_of({}), 3)) if isinstance(one, SendResult)]
    assert answered.result.step == 1
    assert ran(core.handle(done(4))) == [3]
    core.handle(done(4))
    assert core.num_queued == 0


def test_two_plans_of_the_most_steps_are_kept() -> None:
    core = adopted()
    rows = [Row(1, [-1], (), MAX_STEPS, slot=0, first_page=4, opens=False)]
    core.handle(several(1, rows_of({"pages": (1, 2, 3, 4)}), MAX_STEPS))
    assert core.handle(several(1 + MAX_STEPS, rows, MAX_STEPS)) == []
    begun = 1
    while commands := core.handle(done(4)):
        begun += len(ran(commands))
        if not ran(commands):
            break
    assert begun == 2 * MAX_STEPS
    assert LIMITS.most_pages >= 4
