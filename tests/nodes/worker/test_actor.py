"""The worker's actor over a recorded context: bring-up, steps inline and in its thread, adoption, draining."""

import asyncio
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import msgspec
import pytest

from kvstore.errors import PoolMissing
from kvstore.pool.page_pool import HeapHost
from kvstore.protocol import MapPool
from mesh.address import Endpoint
from mesh.errors import RemoteError, Unreachable
from mesh.membership.view import Member
from nodes.asks import ASK_NAMES
from nodes.protocol import Adopt, Adopted, Fence, StepResult, StepResults
from nodes.worker.actor import WorkerActor
from nodes.worker.errors import LayoutMismatch
from nodes.worker.steps.step import RunnableStep, StepOutcome
from tests.mesh.recorded_call import RecordedCall
from tests.nodes.step_plans import Row, plan_of
from tests.nodes.worker.recorded_worker import (
    SCHEDULER,
    adopt,
    config,
    context_of,
    plan,
    pool,
    started,
    working,
)


async def test_a_worker_whose_pool_was_made_again_ends() -> None:
    def agent(epoch: int, **incarnations: int) -> Member:
        attributes = {"incarnations": incarnations}
        return Member(
            actor_id="agent-0", role="kv_agent", epoch=epoch, endpoint=Endpoint("", ""), attributes=attributes
        )

    host = HeapHost()
    actor = WorkerActor(config(), host)
    context = context_of(pool(host))
    actor.ctx = context
    actor.on_members([agent(1, g=1)], [], [])
    await actor.start()
    for epoch, incarnations in enumerate([{"g": 1}, {"g": 1, "h": 9}, {}, {"g": 4}], 2):
        context.members.reset(1, epoch, [agent(epoch, **incarnations)])
        assert context.ended == []
        actor.on_members([], [], [])
    assert context.ended == ["agent-0 has made a new pool for g"]
    await actor.stop()


async def test_a_worker_that_its_scheduler_fences_ends() -> None:
    actor, context = await working(epoch=3)
    for scheduler_epoch, worker_epoch in ((2, 5), (4, 5), (3, 4), (3, 6)):
        actor.on_tell(SCHEDULER, Fence(scheduler_epoch=scheduler_epoch, worker_epoch=worker_epoch, reason=""), ())
    assert context.ended == [], "another scheduler's, or another worker's business"
    actor.on_tell(SCHEDULER, Fence(scheduler_epoch=3, worker_epoch=5, reason="it said 7"), ())
    assert context.ended == [f"{SCHEDULER} rejects this worker's answers: it said 7"]
    await actor.stop()


async def test_draining_ends_with_the_running_step() -> None:
    actor, context = await working("echo?step_ms=1")
    actor.on_tell(SCHEDULER, *plan(1, [7, 8, 9]))
    actor.on_tell(SCHEDULER, *plan(2, [7], start=3))
    await actor.drain()
    assert [result.step for _, result in context.told] == [1]
    await actor.drain()
    await actor.stop()


async def test_echo_over_the_pool() -> None:
    host = HeapHost()
    actor = WorkerActor(config("echo?step_ms=1"), host, age=lambda: 7.0)
    context = await started(actor, Unreachable("agent-0"), pool(host))
    ((state, attributes),) = context.announced
    assert state == "ready"
    assert (attributes["group"], attributes["vocab_size"], attributes["numerics"]) == ("g", 259, "echo")
    adopted = adopt(actor)
    assert 7.0 <= adopted.start_s < 8.0, "its process's age at the start, and what that took since it had the pool"
    assert adopted == Adopted(
        worker_epoch=5, numerics="echo", vocab_size=259, max_batch_tokens=2048, incarnation=1, asks=list(ASK_NAMES),
        start_s=adopted.start_s,
    )  # fmt: skip
    actor.on_tell(SCHEDULER, *plan(1, [7, 8, 9]))
    actor.on_tell(SCHEDULER, *plan(2, [7], start=3))
    assert actor.stats() == {"mesh_worker_queued_steps": 1.0}
    assert context.told == []
    while len(context.told) < 2:
        await asyncio.sleep(0)
    assert [(to, result.step, result.token_ids) for to, result in context.told] == [
        ("scheduler-0", 1, [7]), ("scheduler-0", 2, [8]),
    ]  # fmt: skip
    assert context.told[0][1].elapsed_s >= 0.001
    actor.on_tell(SCHEDULER, *plan(2, [7], start=3))
    assert len(context.told) == 3
    await actor.drain()
    actor.on_tell(SCHEDULER, *plan(3, [7], start=3, epoch=9))
    assert adopt(actor, epoch=0) == "stale_epoch"
    counters = context.metrics.snapshot().counters
    assert counters['mesh_worker_steps_refused_total{reason="wrong_epoch"}'] == 1
    assert counters["mesh_worker_tokens_total"] == 4
    await actor.stop()


async def test_many_waiting_steps_without_delay_do_not_recurse() -> None:
    actor, context = await working()
    for step in range(10, 1, -1):
        actor.on_tell(SCHEDULER, *plan_of(step, [Row(1, [-1], (), step + 1, 3, first_page=2, opens=False)]))
    assert context.told == []
    actor.on_tell(SCHEDULER, *plan(1, [7, 8, 9]))
    assert [result.step for _, result in context.told] == list(range(1, 11))
    assert [result.token_ids for _, result in context.told[:4]] == [[7], [8], [9], [257]]
    await actor.drain()


class ThreadedRunner:
    """Remembers the threads it ran in; raises for token 13; waits for `gate`."""

    numerics = "threaded"

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}
        self.gate = threading.Event()
        self.gate.set()

    def run(self, step: RunnableStep) -> StepOutcome:
        self.threads.add(threading.get_ident())
        self.gate.wait(10)
        if 13 in step.token_ids:
            raise RuntimeError("thirteen")
        return StepOutcome([step.step])


async def test_models_load_and_run_in_one_thread_of_their_own() -> None:
    runners: list[ThreadedRunner] = []
    actor, context = await working("random:tiny-llama", lambda *_: runners.append(ThreadedRunner()) or runners[0])
    (runner,) = runners
    runner.gate.clear()
    actor.on_tell(SCHEDULER, *plan(1, [7]))
    actor.on_tell(SCHEDULER, *plan(2, [13]))
    await asyncio.sleep(0)
    call = RecordedCall(Adopt(scheduler_epoch=1))
    actor.on_ask(call)
    assert call.answer is None, "the running step comes first"
    assert context.told == []
    runner.gate.set()
    await context.until_told(2)
    assert isinstance(call.answer, Adopted)
    results: list[StepResult] = [result for _, result in context.told]
    assert [result.token_ids for result in results] == [[1], [-1]]
    assert [error.code for error in results[1].errors] == ["poisoned_request"]
    await actor.drain()
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads
    await actor.stop()


async def test_results_of_one_plan_are_told_together() -> None:
    """All that come within a millisecond, but what the first step of a new row draws goes at once."""
    actor, context = await working("echo")
    message, buffers = plan(1, [7])
    actor.on_tell(SCHEDULER, msgspec.structs.replace(message, num_steps=4), buffers)
    (_, first), (receiver, told) = context.told
    assert receiver == SCHEDULER.actor_id
    assert isinstance(first, StepResult)
    assert first.step == 1
    assert isinstance(told, StepResults)
    assert [result.step for result in told.results] == [2, 3, 4]
    actor.on_tell(SCHEDULER, *plan(2, [7]))
    assert context.told[2:] == [(SCHEDULER.actor_id, told.results[0])], "asked for again: by itself and at once"
    await actor.stop()


async def test_a_result_waits_for_the_next_one_for_a_millisecond() -> None:
    actor, context = await working("echo?step_ms=30")
    message, buffers = plan(1, [7])
    began = asyncio.get_running_loop().time()
    actor.on_tell(SCHEDULER, msgspec.structs.replace(message, num_steps=2), buffers)
    await context.until_told(1)
    assert asyncio.get_running_loop().time() - began < 0.055, "not until the next step has ended"
    await context.until_told(2)
    assert [told.step for _, told in context.told] == [1, 2]
    await actor.stop()


async def test_a_step_that_has_not_ended_within_its_timeout_is_the_end_of_the_worker() -> None:
    runner, killed = ThreadedRunner(), asyncio.Event()
    actor, context = await working("random:tiny-llama", lambda *_: runner, killed.set)

    def quick(step: int) -> None:
        message, buffers = plan(step, [7])
        actor.on_tell(SCHEDULER, msgspec.structs.replace(message, timeout_s=0.05), buffers)

    quick(1)
    await context.until_told(1)
    await asyncio.sleep(0.1)
    assert not killed.is_set(), "a step that has ended has no deadline"
    runner.gate.clear()
    quick(2)
    await asyncio.wait_for(killed.wait(), 5)
    assert len(context.told) == 1
    runner.gate.set()
    await actor.stop()


class FailingDevice:
    """Launches every step, and fails when it is waited for."""

    numerics = "failing"

    def run(self, step: RunnableStep) -> StepOutcome:
        raise AssertionError("a pipelined runner is launched")

    def launch(self, step: RunnableStep) -> int:
        return step.step

    def finish(self, launched: int) -> StepOutcome:
        raise RuntimeError("unspecified launch failure")

    def synchronize(self) -> None:
        raise RuntimeError("unspecified launch failure")


async def test_a_device_that_fails_is_the_end_of_the_worker() -> None:
    killed = asyncio.Event()
    actor, context = await working("random:tiny-llama", lambda *_: FailingDevice(), killed.set)
    actor.on_tell(SCHEDULER, *plan(1, [7]))
    await asyncio.wait_for(killed.wait(), 5)
    assert context.told == [], "it is not the request's fault"
    await actor.stop()


async def test_a_step_that_raises_is_counted_and_logged_and_a_broken_device_ends_its_worker() -> None:
    def run(step: RunnableStep) -> StepOutcome:
        if runner.is_broken or len(step.rows) > 1:
            raise RuntimeError("out of luck")
        return StepOutcome([9])

    runner, killed = SimpleNamespace(numerics="", run=run, is_broken=False), asyncio.Event()
    actor, context = await working("random:tiny-llama", lambda *_: runner, killed.set)
    logged: list[tuple[str, dict]] = []
    context.log.warning = context.log.error = lambda event, **fields: logged.append((event, fields))
    assert context.metrics.snapshot().counters["mesh_worker_steps_failed_total"] == 0
    for step in (1, 2):
        actor.on_tell(SCHEDULER, *plan_of(step, [Row(1, [7], [4]), Row(2, [7], [5], slot=1)]))
    await context.until_told(2)
    assert [result.token_ids for _, result in context.told] == [[9, 9], [9, 9]]
    assert context.metrics.snapshot().counters["mesh_worker_steps_failed_total"] == 2
    tracebacks = [fields["traceback"] for event, fields in logged if event == "step failed, its rows ran alone"]
    assert "RuntimeError: out of luck" in tracebacks[0]
    assert tracebacks[1:] == ["same as before"]
    runner.is_broken = True
    actor.on_tell(SCHEDULER, *plan(3, [7]))
    await asyncio.wait_for(killed.wait(), 5)
    assert len(context.told) == 2, "no request is poisoned by a device that fails"
    ((_, fields),) = [one for one in logged if one[0] == "device failed"]
    assert "DeviceFailed" in fields["traceback"]
    await actor.stop()


async def test_a_row_that_fails_is_logged_with_its_request() -> None:
    def run(step: RunnableStep) -> StepOutcome:
        if 8 in step.token_ids[step.rows[0].token_offset : step.rows[-1].token_offset + 1]:
            raise RuntimeError("not this one")
        return StepOutcome([9] * len(step.rows))

    runner = SimpleNamespace(numerics="", run=run)
    actor, context = await working("random:tiny-llama", lambda *_: runner, lambda: None)
    logged: list[tuple[str, dict]] = []
    context.log.warning = lambda event, **fields: logged.append((event, fields))
    rows = [Row(1, [7], [4], request_id="chatcmpl-a-0"), Row(2, [8], [5], slot=1, request_id="chatcmpl-b-0")]
    actor.on_tell(SCHEDULER, *plan_of(1, rows))
    await context.until_told(1)
    assert [result.token_ids for _, result in context.told] == [[9, -1]]
    failed = [fields["request_id"] for event, fields in logged if event == "row failed"]
    assert failed == ["chatcmpl-b-0"]
    await actor.stop()


def test_a_process_whose_thread_hangs_can_be_killed_from_inside() -> None:
    program = (
        "import threading\nfrom nodes.worker.actor import kill_this_process\n"
        "threading.Thread(target=threading.Event().wait).start()\nkill_this_process()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL


async def test_bring_up_failures_are_typed() -> None:
    host = HeapHost()
    handle = pool(host, "random:tiny-llama")
    with pytest.raises(LayoutMismatch, match="same model, dtype, page size and ranks"):
        await started(WorkerActor(config(), host), handle)
    with pytest.raises(RemoteError, match="unknown_group"):
        await started(WorkerActor(config(), host), RemoteError("unknown_group", "no such group"))
    handle = pool(host)
    host.unlink(handle.path)
    actor = WorkerActor(config(), host)
    with pytest.raises(PoolMissing):
        await started(actor, handle)
    assert adopt(actor) == "not_ready"
    actor.on_tell(SCHEDULER, *plan(1, [7]))
    call = RecordedCall(MapPool(group="g"))
    actor.on_ask(call)
    assert call.answer == "not_served"
    actor.on_tell(SCHEDULER, MapPool(group="g"), [])
    await actor.stop()
