"""What a worker notes of its steps: all of them, and the chunks of prompts in them."""

from mesh.runtime.trace_ring import TraceRing, read_trace
from nodes.trace_notes import BEGAN, COMPUTED_STEP, Noted, step_size
from nodes.worker.core import AdoptArrived, RunStep, StepArrived, WorkerCore
from nodes.worker.steps.notes import note_begin, note_end
from tests.nodes.noted import noted_in
from tests.nodes.step_plans import Row, plan_of
from tests.nodes.worker.test_core import LIMITS, adopt, done, follows


def ran(core: WorkerCore, event: StepArrived | AdoptArrived) -> RunStep:
    (command,) = [one for one in core.handle(event) if isinstance(one, RunStep)]
    return command


def test_steps_and_the_chunks_in_them() -> None:
    core, clock = WorkerCore(LIMITS), iter(range(100))
    ring = TraceRing(lambda: float(next(clock)))
    core.handle(adopt())
    rows = [
        Row(1, [5, 6, 7, 8], (1, 3), prompt=4, request_id="long"),
        Row(2, [9], (2,), slot=1, request_id="short"),
    ]
    first = ran(core, StepArrived("s", *plan_of(1, rows), 0.25))
    assert (first.at, [one.sequence for one in first.opens]) == (0.25, [1, 2])
    # A second step waits behind it, and begins when it has ended.
    core.handle(StepArrived("s", *plan_of(2, follows(0, start=4)), 0.5))
    note_begin(ring, first.runnable, first.opens, 0.003)
    note_end(ring, first.runnable, 0.02)
    (second,) = [one for one in core.handle(done(3, 4)) if isinstance(one, RunStep)]
    assert (second.at, second.opens) == (0.5, [])
    note_begin(ring, second.runnable, second.opens, 5000.0)
    trace = read_trace(ring.content, "worker")
    assert trace is not None
    assert [(step.kind, step.key, step.a, step.b) for step in trace.steps] == [
        (BEGAN, 1, step_size(2, 5), 3000),
        (COMPUTED_STEP, 1, step_size(2, 5), 20_000),
        # 32 bits of microseconds are 71 minutes.
        (BEGAN, 2, step_size(1, 1), 0xFFFF_FFFF),
    ]
    assert noted_in(ring, "long") == [(Noted.KNOWN, 1, 4), (Noted.COMPUTING, 0, 4), (Noted.COMPUTED, 1, 20_000)]
    assert noted_in(ring, "short") == [(Noted.KNOWN, 1, 1)], "a row of one token is in the step's record alone"
