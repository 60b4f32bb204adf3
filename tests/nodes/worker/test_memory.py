"""A worker lets go of its memory and takes it up: orders in any order, and models that answer as before."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layout import KVLayout
from kvstore.pool.page_pool import HeapHost, PoolInfo
from kvstore.protocol import PoolHandle
from mesh.address import Address
from mesh.errors import RemoteError
from mesh.runtime.effects import Asked, Refuse, Reply
from nodes.model_spec import Quantization
from nodes.protocol import HasLetGo, HasTakenUp, LetGo, StepPlan, TakeUp
from nodes.worker.actor import WorkerActor
from nodes.worker.memory.core import (
    SUPERSEDED,
    GoOn,
    HasReleased,
    HasResumed,
    MemoryOccupation,
    Release,
    Resume,
    Stage,
    StepsEnded,
    StopSteps,
)
from tests.mesh.mesh_under_test import until
from tests.mesh.recorded_call import RecordedCall
from tests.nodes.recording_context import RecordingContext
from tests.nodes.step_plans import Row, plan_of
from tests.nodes.worker.recorded_worker import (
    SCHEDULER,
    adopt,
    config,
    context_of,
    plan,
    pool,
    started,
)

AGENT = Address("agent-0", 1)
HANDLE = PoolHandle(
    group="g", agent="agent-0", path="p", num_pages=2, incarnation=7,
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=1),
)  # fmt: skip


GIVE_BACK = LetGo(group="g", number=1, weights="reload")


def let_go(number: int, weights: str = "reload", epoch: int = 1) -> Asked:
    return Asked(Address("agent-0", epoch), LetGo(group="g", number=number, weights=weights), f"call {number}")


def take_up(number: int, epoch: int = 1) -> Asked:
    return Asked(Address("agent-0", epoch), TakeUp(group="g", number=number, pool=HANDLE), f"call {number}")


def replaced(call: str, why: str) -> Refuse:
    return Refuse(call, SUPERSEDED, why, retryable=True)


@pytest.fixture
def host() -> HeapHost:
    return HeapHost()


def test_the_running_step_is_waited_for() -> None:
    core = MemoryOccupation()
    order, gone = let_go(1), HasLetGo(group="g", number=1)
    assert core.handle(StepsEnded()) == [], "steps end all the time"
    assert core.handle(order) == [StopSteps()]
    assert not core.is_held
    assert core.handle(order._replace(call="again")) == []
    assert core.handle(StepsEnded()) == [Release("reload")]
    assert core.handle(HasReleased()) == [Reply("call 1", gone), Reply("again", gone)]
    assert core.handle(order._replace(call="once more")) == [Reply("once more", gone)]
    order = take_up(2)
    assert core.handle(order) == [Resume(HANDLE)]
    assert core.handle(HasResumed()) == [GoOn(), Reply("call 2", HasTakenUp(group="g", number=2))]
    assert core.is_held


def test_the_last_order_counts() -> None:
    core = MemoryOccupation()
    assert core.handle(let_go(1)) == [StopSteps()]
    refused = replaced("call 1", "order (1, 2) came before this one was carried out")
    assert core.handle(take_up(2)) == [refused]
    assert core.handle(StepsEnded()) == [GoOn(), Reply("call 2", HasTakenUp(group="g", number=2))], (
        "nothing was given up"
    )
    (late,) = core.handle(let_go(1))
    assert isinstance(late, Refuse)
    assert core.handle(let_go(1, epoch=2)) == [StopSteps()], "another agent counts from the beginning"
    assert core.handle(StepsEnded()) == [Release("reload")]
    assert isinstance(core.handle(take_up(2, epoch=2))[0], Refuse)
    assert core.handle(HasReleased()) == [Resume(HANDLE)], "what was begun is done to its end first"
    assert core.handle(let_go(3, epoch=2))[0] == replaced("call 2", "order (2, 3) came before this one was carried out")
    assert core.handle(HasResumed()) == [GoOn(), StopSteps()]


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 2)), max_size=25))
def test_whatever_comes_the_newest_order_is_done_and_every_call_answered(orders: list[tuple[int, bool, int]]) -> None:
    """`orders`: number, what, and how much of what was begun ends before the next one comes."""
    core, answered, pending, newest = MemoryOccupation(), [], [], (0, True)
    num_calls = 0

    def perform(commands: list[Any]) -> None:
        for command in commands:
            match command:
                case StopSteps():
                    pending.append(StepsEnded())
                case Release():
                    pending.append(HasReleased())
                case Resume():
                    pending.append(HasResumed())
                case Reply() | Refuse():
                    answered.append(command.call)

    for number, is_up, num_ended in orders:
        # The agent gives each number once.
        is_up = is_up if number != newest[0] else newest[1]
        newest = max(newest, (number, is_up))
        event = take_up(number) if is_up else let_go(number)
        perform(core.handle(event._replace(call=num_calls)))
        num_calls += 1
        for _ in range(num_ended):
            if pending:
                perform(core.handle(pending.pop(0)))
    while pending:
        perform(core.handle(pending.pop(0)))
    assert core.stage is (Stage.HELD if newest[1] else Stage.RELEASED)
    assert sorted(answered) == list(range(num_calls))


def order(actor: WorkerActor, message: LetGo | TakeUp) -> RecordedCall:
    call = RecordedCall(message)
    call.sender = AGENT
    actor.on_ask(call)
    return call


async def answer_of(call: RecordedCall) -> Any:
    await until(lambda: call.answer is not None, 20.0)
    return call.answer


async def with_pool(host: HeapHost, model: str = "echo") -> tuple[WorkerActor, RecordingContext, PoolHandle]:
    actor, handle = WorkerActor(config(model), host), pool(host)
    return actor, await started(actor, handle), handle


async def test_a_worker_without_memory_runs_nothing_and_goes_on_with_a_new_pool(host: HeapHost) -> None:
    actor, context, handle = await with_pool(host, "echo?step_ms=1")
    adopt(actor)
    actor.on_tell(SCHEDULER, *plan(1, [7, 8, 9]))
    call = order(actor, GIVE_BACK)
    actor.on_tell(SCHEDULER, *plan(2, [7], start=3))
    assert call.answer is None, "a step runs"
    assert adopt(actor, epoch=2) == "memory_released"
    assert await answer_of(call) == HasLetGo(group="g", number=1)
    assert [result.step for _, result in context.told] == [1]
    assert actor._pool is None
    assert actor._engine.runner is None
    assert context.announced[-1] == ("released", {})
    actor.on_members([], [], [])
    fresh = host.create("g", PoolInfo(group="g", num_pages=20, layout=handle.layout, incarnation=2))
    again = PoolHandle(group="g", agent="agent-0", path=fresh.path, num_pages=20, layout=handle.layout, incarnation=2)
    call = order(actor, TakeUp(group="g", number=2, pool=again))
    assert await answer_of(call) == HasTakenUp(group="g", number=2)
    assert context.announced[-1] == ("ready", {})
    # A scheduler that slept through it has to adopt again, and hears of the other pool.
    actor.on_tell(SCHEDULER, *plan(2, [7], start=3))
    assert len(context.told) == 1
    assert adopt(actor, epoch=1).incarnation == 2
    actor.on_tell(SCHEDULER, *plan(1, [4, 5, 6], epoch=2))
    assert len(context.told) == 1
    adopt(actor, epoch=3)
    actor.on_tell(SCHEDULER, *plan(1, [4, 5, 6], epoch=3))
    await context.until_told(2)
    assert context.told[-1][1].token_ids == [4]
    assert context.ended == []
    await actor.stop()


async def test_a_resumption_does_not_take_a_drain_back(host: HeapHost) -> None:
    actor, context, handle = await with_pool(host)
    await actor.drain()
    await answer_of(order(actor, LetGo(group="g", number=1, weights="keep")))
    await answer_of(order(actor, TakeUp(group="g", number=2, pool=handle)))
    adopt(actor)
    actor.on_tell(SCHEDULER, *plan(1, [4, 5, 6]))
    assert (context.told, actor.stats()["mesh_worker_queued_steps"]) == ([], 1), "it has been drained"
    await actor.stop()


async def test_a_worker_that_cannot_take_up_ends(host: HeapHost) -> None:
    actor, context, handle = await with_pool(host)
    await answer_of(order(actor, GIVE_BACK))
    host.unlink(handle.path)
    order(actor, TakeUp(group="g", number=2, pool=handle))
    await asyncio.sleep(0.01)
    assert len(context.ended) == 1
    assert "PoolMissing" in context.ended[0]


async def test_a_worker_that_cannot_let_go_ends(host: HeapHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(weights: str) -> None:
        raise MemoryError("no room to free anything")

    actor, context, _ = await with_pool(host)
    monkeypatch.setattr(actor._engine, "release", broken)
    call = order(actor, LetGo(group="g", number=2, weights="reload"))
    late = order(actor, GIVE_BACK)
    assert await answer_of(late) == "superseded"
    await until(lambda: context.ended)
    assert "MemoryError: no room to free anything" in context.ended[0]
    assert call.answer is None, "its end is the answer"


async def test_one_that_starts_waits_without_memory_or_ends(host: HeapHost) -> None:
    actor = WorkerActor(config(), host)
    released = RemoteError("memory_released", "it is", retryable=True)
    actor.ctx = context = context_of(released, RemoteError("draining", "", retryable=True), pool(host))
    call = order(actor, GIVE_BACK)
    assert call.answer == HasLetGo(group="g", number=1), "it has nothing"
    assert order(actor, TakeUp(group="g", number=2, pool=HANDLE)).answer == "not_ready"
    await actor.start()
    assert [state for state, _ in context.announced] == ["released", "ready"]
    assert context.announced[0][1] == {"group": "g"}
    loading = WorkerActor(config(), host)
    loading.ctx = context_of()
    loading._pool = actor._pool
    assert order(loading, GIVE_BACK).answer == "not_ready"
    assert loading.ctx.ended == ["the memory of g must be released"]


async def test_one_that_starts_asks_again_for_a_pool_that_was_released_while_its_place_was_told(host: HeapHost) -> None:
    actor = WorkerActor(config(), host)
    handle = pool(host)
    info = host.open(handle.path, writable=True).info
    old = host.create("old", msgspec.structs.replace(info, weights="keep"))
    actor.ctx = context = context_of(msgspec.structs.replace(handle, path=old.path), handle)
    await actor.start()
    assert [state for state, _ in context.announced] == ["ready"]


MODEL = "random:tiny-llama"


@pytest.mark.parametrize(("weights", "quantize"), [("reload", "none"), ("keep", "none"), ("reload", "int8")])
async def test_a_model_draws_the_same_tokens_afterwards(host: HeapHost, weights: str, quantize: Quantization) -> None:
    actor = WorkerActor(msgspec.structs.replace(config(MODEL), quantize=quantize), host)
    handle = pool(host, MODEL, quantize)
    context = await started(actor, handle)
    made: list[Any] = [actor._engine.runner]

    def prompt(step: int, epoch: int) -> tuple[StepPlan, list[bytes]]:
        return plan_of(step, [Row(1, [5, 6, 7], [4], prompt=3)], epoch)

    adopt(actor)
    actor.on_tell(SCHEDULER, *prompt(1, 1))
    await context.until_told(1)
    await answer_of(order(actor, LetGo(group="g", number=1, weights=weights)))
    assert (actor._engine.runner is None) == (weights == "reload")
    await answer_of(order(actor, TakeUp(group="g", number=2, pool=pool(host, MODEL, quantize))))
    made.append(actor._engine.runner)
    assert ["int8" in runner.numerics for runner in made] == [quantize == "int8"] * 2
    assert (made[0] is made[1]) == (weights == "keep")
    adopt(actor, 2)
    actor.on_tell(SCHEDULER, *prompt(1, 2))
    await context.until_told(2)
    assert context.told[0][1].token_ids == context.told[1][1].token_ids != [-1]
    await actor.stop()
