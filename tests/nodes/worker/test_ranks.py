"""Tensor-parallel ranks: who meets whom, what ends a group, and what another scheduler's adoption waits for."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pool.page_pool import HeapHost, PoolInfo
from kvstore.protocol import MapPool, PoolHandle
from mesh.address import Address, Endpoint
from mesh.errors import RemoteError
from mesh.membership.view import Member
from mesh.runtime.effects import Refuse, Reply
from nodes.model_spec import resolve_model
from nodes.protocol import Adopt, Adopted, GroupFormed, JoinGroup, StepPlan, StepResult
from nodes.worker.actor import WorkerActor
from nodes.worker.config import ConfigError, WorkerConfig
from nodes.worker.core import AdoptArrived, RunStep, StepArrived, StepDone
from nodes.worker.parallel.group import RankGroup
from nodes.worker.parallel.ranks import Over, RankCore, RankRendezvous, who_is_missing
from nodes.worker.steps.columns import Limits
from nodes.worker.steps.step import StepOutcome
from tests.mesh.mesh_under_test import until
from tests.nodes.recording_context import RecordingContext
from tests.nodes.step_plans import Row, plan_of

IDS = ("w", "w.1", "w.2")


def join(rank: int, **fields: Any) -> JoinGroup:
    return JoinGroup(**{"group": "g", "rank": rank, "size": 3, "model": "m", "incarnation": 1, **fields})


def member(actor_id: str, epoch: int) -> Member:
    return Member(actor_id=actor_id, role="worker", epoch=epoch, endpoint=Endpoint("", ""))


# the rendezvous


def test_all_ranks_hear_of_the_group_when_the_last_one_has_come() -> None:
    rendezvous = RankRendezvous(join(0), 4, b"id")
    assert rendezvous.join(join(2), 7, "call 2") == []
    formed = GroupFormed(epochs=[4, 9, 7], unique_id=b"id")
    assert rendezvous.join(join(1), 9, "call 1") == [Reply("call 2", formed), Reply("call 1", formed)]
    assert rendezvous.join(join(2), 7, "again") == [Reply("again", formed)], "its answer was lost"


def test_the_latest_incarnation_and_its_latest_call_count() -> None:
    rendezvous = RankRendezvous(join(0), 1, b"")
    assert rendezvous.join(join(1), 3, "old") == []
    assert rendezvous.join(join(1), 4, "first") == []
    [refusal] = rendezvous.join(join(1), 3, "late")
    assert refusal.code == "stale_epoch"
    assert rendezvous.join(join(1), 4, "second") == []
    assert [answer.call for answer in rendezvous.join(join(2), 1, "other")] == ["second", "other"]


def test_who_has_gone_before_there_was_a_group_is_waited_for() -> None:
    rendezvous = RankRendezvous(join(0), 1, b"")
    rendezvous.join(join(1), 3, "dead")
    rendezvous.lost(1, 2)
    rendezvous.lost(1, 3)
    assert rendezvous.join(join(2), 1, "other") == []
    assert rendezvous.formed is None


def test_another_incarnation_of_a_rank_ends_the_group() -> None:
    rendezvous = RankRendezvous(join(0), 1, b"")
    rendezvous.join(join(1), 3, "a")
    rendezvous.join(join(2), 1, "b")
    refusal, over = rendezvous.join(join(1), 4, "c")
    assert refusal.retryable, "the next rank 0 will have it"
    assert isinstance(over, Over)


@pytest.mark.parametrize(
    ("asked", "code", "retryable"),
    [
        (join(1, model="x"), "group_mismatch", False),
        (join(1, size=2), "group_mismatch", False),
        (join(3), "group_mismatch", False),
        (join(0), "group_mismatch", False),
        (join(1, group="h"), "group_mismatch", False),
        (join(1, incarnation=2), "pool_changed", True),
    ],
)
def test_ranks_that_do_not_fit_are_refused(asked: JoinGroup, code: str, retryable: bool) -> None:
    [refusal] = RankRendezvous(join(0), 1, b"").join(asked, 1, "call")
    assert (refusal.code, refusal.retryable) == (code, retryable)


def test_a_group_is_over_when_an_incarnation_of_it_is() -> None:
    epochs = [4, 9, 7]
    assert who_is_missing(IDS, epochs, [Address("w.1", 8), Address("x", 9)], [member("w.1", 9), member("w.2", 6)]) == ""
    assert "w.1#9 is gone" in who_is_missing(IDS, epochs, [Address("w.1", 9)], [])
    assert "w.2#8 has replaced epoch 7" in who_is_missing(IDS, epochs, [], [member("w.2", 8)])


@given(seed=st.integers(0, 100_000), size=st.sampled_from([2, 3, 4]))
@settings(max_examples=200, deadline=None)
def test_ranks_meet_whatever_dies_in_any_order(seed: int, size: int) -> None:
    """Joins are lost, answers too; ranks die and notice each other's deaths late. In the end there is one group."""
    dice = random.Random(seed)
    epochs = [1] * size
    groups: list[list[int] | None] = [None] * size
    rendezvous = RankRendezvous(join(0, size=size), 1, b"")
    num_deaths = dice.randrange(6)

    def restart(rank: int) -> None:
        nonlocal rendezvous
        epochs[rank] += 1
        groups[rank] = None
        if rank == 0:
            rendezvous = RankRendezvous(join(0, size=size), epochs[0], b"")

    def ask(rank: int, lossy: bool) -> None:
        for one in rendezvous.join(join(rank, size=size), epochs[rank], (rank, epochs[rank])):
            if isinstance(one, Reply):
                answered, epoch = one.call
                if epoch == epochs[answered] and not (lossy and dice.random() < 0.3):
                    groups[answered] = one.message.epochs
                groups[0] = one.message.epochs
            elif isinstance(one, Over):
                restart(0)

    def notice(rank: int) -> None:
        group = groups[rank]
        if group is not None:
            known = [member(f"w{other}", epochs[other]) for other in range(size)]
            if who_is_missing([f"w{other}" for other in range(size)], group, [], known):
                restart(rank)

    for _ in range(60):
        luck, rank = dice.random(), dice.randrange(size)
        if luck < 0.15 and num_deaths:
            num_deaths -= 1
            restart(rank)
        elif luck < 0.4:
            notice(rank)
        elif rank and groups[rank] is None:
            ask(rank, lossy=True)
    for _ in range(3 * size):
        for rank in range(size):
            notice(rank)
            if rank and groups[rank] is None:
                ask(rank, lossy=False)
    assert groups == [epochs] * size


# adoption


def plan(step: int, epoch: int = 1, start: int = 0) -> tuple[StepPlan, list[bytes]]:
    tokens = [7] if start else [7, 8, 9]
    return plan_of(step, [Row(1, tokens, [4, 5], start, 3)], epoch)


def test_another_scheduler_waits_until_what_the_first_has_sent_is_done() -> None:
    """Other ranks may have begun the queued step: to drop it would leave them waiting."""
    core = RankCore(Limits(20, 16, 300, 100, 64))
    core.handle(AdoptArrived(Adopt(scheduler_epoch=1), "a"))
    assert [type(one) for one in core.handle(StepArrived("s", *plan(1)))] == [RunStep]
    core.handle(StepArrived("s", *plan(2, start=3)))
    assert core.handle(AdoptArrived(Adopt(scheduler_epoch=2, next_step=1), "b")) == []
    assert core.num_deferred == 1
    commands = core.handle(StepDone(StepOutcome([7], []), 0.0))
    assert [type(one) for one in commands][-1] is RunStep, "the queued step runs first"
    commands = core.handle(StepDone(StepOutcome([8], []), 0.0))
    assert commands[-1] == Reply("b", core.adopted)
    assert core.num_deferred == 0
    assert core.scheduler_epoch == 2


def test_the_same_scheduler_is_answered_at_once() -> None:
    """What runs may wait for a rank that has yet to be told the step again, by this scheduler."""
    core = RankCore(Limits(20, 16, 300, 100, 64))
    core.handle(AdoptArrived(Adopt(scheduler_epoch=1), "a"))
    core.handle(StepArrived("s", *plan(1)))
    assert core.handle(AdoptArrived(Adopt(scheduler_epoch=1, next_step=1), "b")) == [Reply("b", core.adopted)]
    assert core.num_deferred == 0
    assert core.is_running
    [late] = core.handle(AdoptArrived(Adopt(scheduler_epoch=0), "c"))
    assert isinstance(late, Refuse)


# the actor


class Mesh:
    """Actors of one group that ask each other, and an agent with their pools; membership is what the test says."""

    def __init__(self, size: int, model: str = "echo") -> None:
        self.model = model
        self.host = HeapHost()
        self.ids = IDS[:size]
        self.handles: list[PoolHandle] = []
        for rank in range(size):
            layout = resolve_model(model).kv_layout(tp_rank=rank, tp_size=size)
            info = PoolInfo(group="g", num_pages=20, layout=layout, incarnation=1)
            path = self.host.create(f"g.{rank}", info).path
            self.handles.append(PoolHandle(group="g", agent="a", path=path, num_pages=20, layout=layout, incarnation=1))
        self.actors: dict[str, WorkerActor] = {}
        self.ended: list[str] = []

    def add(self, rank: int, epoch: int = 1, more: dict[str, Any] | None = None, **fields: Any) -> WorkerActor:
        config = WorkerConfig(
            group="g", model=self.model, agent="a", map_retry_s=0.001, tp_rank=rank, tp_size=len(self.ids),
            workers=self.ids, **fields,
        )  # fmt: skip
        actor = self.actors[self.ids[rank]] = WorkerActor(config, self.host, **(more or {}))
        actor.ctx = self.context(Address(self.ids[rank], epoch))
        return actor

    def context(self, address: Address) -> RecordingContext:
        async def answer(actor_id: str, message: Any) -> Any:
            if isinstance(message, MapPool):
                return self.handles[message.rank]
            call = MeshCall(message, address)
            if actor_id in self.actors:
                self.actors[actor_id].on_ask(call)
            else:
                call.fail("unreachable", "", retryable=True)
            return await call.answer

        ctx = RecordingContext(address, answer)
        ctx.end = lambda reason: self.ended.append(f"{address}: {reason}")
        return ctx

    async def start(self, *ranks: int) -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*(self.actors[self.ids[rank]].start() for rank in ranks))


async def two(**fields: Any) -> tuple[Mesh, WorkerActor, WorkerActor]:
    """A group that has started; `fields` are rank 0's."""
    mesh = Mesh(2)
    zero, one = mesh.add(0, **fields), mesh.add(1)
    await mesh.start(0, 1)
    return mesh, zero, one


class MeshCall:
    def __init__(self, message: Any, sender: Address) -> None:
        self.message, self.sender = message, sender
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def reply(self, message: Any) -> None:
        self.answer.set_result(message)

    def fail(self, code: str, message: str, *, retryable: bool = False, param: str | None = None) -> None:
        self.answer.set_exception(RemoteError(code, message, retryable=retryable))


async def adopt(actor: WorkerActor, epoch: int = 1) -> Any:
    call = MeshCall(Adopt(scheduler_epoch=epoch), Address("s", epoch))
    actor.on_ask(call)
    return await call.answer


async def test_ranks_start_in_any_order_and_answer_for_one_group() -> None:
    mesh = Mesh(3)
    for rank, epoch in ((2, 5), (0, 7), (1, 2)):
        mesh.add(rank, epoch)
    await mesh.start(2, 0, 1)
    answers = [await adopt(mesh.actors[one]) for one in mesh.ids]
    assert [answer.group_epoch for answer in answers] == [7, 7, 7]
    assert [answer.worker_epoch for answer in answers] == [7, 2, 5]
    for one in mesh.actors.values():
        await one.stop()


async def test_nobody_joins_as_another() -> None:
    mesh = Mesh(2)
    zero = mesh.add(0)
    starting = asyncio.ensure_future(zero.start())
    await asyncio.sleep(0.01)
    for rank, sender in ((1, "x"), (1, "w"), (0, "w"), (2, "w.1"), (-1, "w.1")):
        call = MeshCall(join(rank, size=2, model="echo"), Address(sender, 1))
        zero.on_ask(call)
        with pytest.raises(RemoteError, match=f"{sender} is not rank {rank} of g"):
            await call.answer
    mesh.add(1)
    await mesh.start(1)
    await starting


async def test_the_death_of_a_rank_ends_the_others() -> None:
    mesh, zero, one = await two()
    zero.on_members([], [member("x", 1), member("w.1", 0)], [])
    assert mesh.ended == []
    zero.on_members([], [member("w.1", 1)], [])
    assert mesh.ended == ["w#1: w.1#1 is gone, and with it the group"]
    one.ctx.members.reset(1, 1, [member("w", 2)])
    one.on_members([], [], [])
    one.on_members([], [], [])
    assert len(mesh.ended) == 2, "said once"
    await zero.stop()
    await one.stop()


async def test_a_rank_that_comes_back_before_its_death_was_heard_of_ends_rank_zero() -> None:
    mesh, _, _ = await two()
    again = asyncio.ensure_future(mesh.add(1, 2).start())
    while not mesh.ended:
        await asyncio.sleep(0)
    assert mesh.ended == ["w#1: rank 1 joined in epoch 1 and now asks in epoch 2"]
    mesh.add(0, 2)
    await mesh.start(0)
    await again
    assert (await adopt(mesh.actors["w.1"])).group_epoch == 2


async def test_a_step_that_does_not_match_ends_the_group_and_the_next_one_too() -> None:
    """The other rank may have begun it. The scheduler hears of two groups that are over, not of a mismatch."""

    mesh = Mesh(2)
    for epoch in (1, 2):
        zero, one = mesh.add(0, epoch), mesh.add(1, epoch)
        await mesh.start(0, 1)
        mesh.ended.clear()
        for actor in (zero, one):
            await adopt(actor)
        zero.on_tell(Address("s", 1), *plan(1))
        one.on_tell(Address("s", 1), *plan_of(1, [Row(8, [7], (), opens=False)]))
        assert mesh.ended == [f"w.1#{epoch}: sequence 8 is not open in slot 0"]
        assert [type(message) for _, message in zero.ctx.told] == [StepResult]
        assert one.ctx.told == []
        zero.on_members([], [member("w.1", epoch)], [])
        assert mesh.ended[1:] == [f"w#{epoch}: w.1#{epoch} is gone, and with it the group"]


async def test_a_rank_that_computes_in_a_thread_dies_of_a_step_that_does_not_match() -> None:
    """The thread may wait for the other rank in an operation: no gentler end would come."""

    mesh, killed = Mesh(2, "random:tiny-qwen3"), []
    for rank in (0, 1):
        more = {"make": lambda *_: Idle(), "collectives": lambda _: Connected(), "kill": lambda: killed.append("")}
        mesh.add(rank, more=more)
    await mesh.start(0, 1)
    one = mesh.actors["w.1"]
    await adopt(one)
    one.on_tell(Address("s", 1), *plan_of(1, [Row(8, [7], (), opens=False)]))
    assert (killed, mesh.ended, one.ctx.told) == ([""], [], [])
    for actor in mesh.actors.values():
        await actor.stop()


async def test_a_step_that_never_ends_under_another_scheduler_ends_the_rank() -> None:
    mesh, zero, _ = await two(adopt_grace_s=0.02)
    await adopt(zero)
    zero._run = lambda step: None  # as in an operation with a rank that never comes
    zero.on_tell(Address("s", 1), *plan(1))
    waiting = asyncio.ensure_future(adopt(zero, 2))
    await until(lambda: mesh.ended)
    assert "not all ranks have it" in mesh.ended[0]
    waiting.cancel()


async def test_a_step_that_ends_in_time_ends_nobody() -> None:
    mesh, zero, _ = await two(adopt_grace_s=0.02)
    await adopt(zero)
    steps: list[Any] = []
    zero._run = steps.append
    zero.on_tell(Address("s", 1), *plan(1))
    waiting = asyncio.ensure_future(adopt(zero, 2))
    await asyncio.sleep(0)
    zero._done(steps[0], StepOutcome([7], []), zero.ctx.now())
    assert isinstance(await waiting, Adopted)
    await asyncio.sleep(0.03)
    assert mesh.ended == []


class Connected:
    """Collectives of one rank, and the maker of them."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.num_ids = self.num_aborts = 0

    def unique_id(self) -> bytes:
        self.num_ids += 1
        return b"the group"

    def connect(self, *arguments: Any) -> "Connected":
        self.made.append(arguments)
        return self

    def abort(self) -> None:
        self.num_aborts += 1


class Idle:
    """A runner that nobody asks anything."""

    numerics = "idle"

    def run(self, step: Any) -> Any:
        raise AssertionError("nobody has sent a step")


async def test_ranks_are_connected_before_their_models_are_loaded() -> None:
    mesh = Mesh(2, "random:tiny-qwen3")
    makers, loaded, killed = [Connected(), Connected()], [], []

    def make(*arguments: Any) -> Idle:
        loaded.append(arguments[3])
        return Idle()

    for rank, maker in enumerate(makers):
        more = {
            "make": make, "kill": lambda rank=rank: killed.append(rank), "collectives": lambda _, m=maker: m,
        }  # fmt: skip
        mesh.add(rank, 3 + rank, more)
    await mesh.start(1, 0)
    assert [maker.made for maker in makers] == [[(b"the group", rank, 2, "cpu")] for rank in (0, 1)]
    assert [maker.num_ids for maker in makers] == [1, 0]
    assert sorted(map(makers.index, loaded)) == [0, 1]
    one = mesh.actors["w.1"]
    one.on_members([], [member("w", 3)], [])
    assert (killed, makers[1].num_aborts) == ([1], 1), "who computes in a thread is killed, for the thread may hang"
    for actor in mesh.actors.values():
        await actor.stop()
    assert makers[0].num_aborts == 1, "it leaves nobody waiting"


async def test_a_group_that_is_over_before_it_is_connected_is_aborted_at_once() -> None:
    maker, left = Connected(), []
    config = WorkerConfig(group="g", model="x", agent="a", tp_rank=1, tp_size=2, workers=IDS[:2])
    group = RankGroup(config, left.append, lambda _: maker)
    mesh = Mesh(2)
    ctx = mesh.context(Address("w.1", 9))
    ctx.members.reset(1, 1, [member("w", 5)])

    class Ahead:
        async def ask(self, *_: Any, **__: Any) -> GroupFormed:
            return GroupFormed(epochs=[4, 8], unique_id=b"old")

    call = MeshCall(join(2), Address("w.2", 1))
    group.on_ask(call)
    with pytest.raises(RemoteError, match="rank 0 is starting"):
        await call.answer
    await group.form(ctx, Ahead(), join(1, size=2), None)
    assert left == ["rank 0 has formed a group with another epoch of this rank, 8"]
    assert group.epoch == 4
    group.connect()
    assert maker.num_aborts == 1


async def test_who_dies_before_there_is_a_group_is_waited_for_again() -> None:
    mesh = Mesh(3)
    zero, _ = mesh.add(0), mesh.add(1)
    starting = [asyncio.ensure_future(mesh.actors[one].start()) for one in ("w", "w.1")]
    await asyncio.sleep(0.01)
    zero.on_members([], [member("w.1", 1), member("x", 1)], [])
    starting[1].cancel()
    mesh.add(2)
    starting.append(asyncio.ensure_future(mesh.actors["w.2"].start()))
    await asyncio.sleep(0.01)
    assert not starting[0].done()
    mesh.add(1, 2)
    await mesh.start(1)
    await asyncio.gather(starting[0], starting[2])
    assert {(await adopt(actor)).group_epoch for actor in mesh.actors.values()} == {1}


@pytest.mark.parametrize("fields", [{"workers": ()}, {"workers": ("w", "w")}, {"workers": ("w", "v"), "tp_rank": 2}])
def test_a_group_is_configured_whole(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WorkerConfig(group="g", model="echo", agent="a", tp_size=2, **fields)


def test_what_one_worker_answers_is_as_ever() -> None:
    answer = Adopted(worker_epoch=1, numerics="", vocab_size=9)
    assert b"group_epoch" not in msgspec.msgpack.encode(answer)
