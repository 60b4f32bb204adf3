"""The scheduler's actor beside a context that records: what it performs, when it wakes, how it starts and ends."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import structlog

from kvstore.cache.allocator import PageState
from kvstore.cache.eviction import POLICIES, EvictionName
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PoolClosed
from kvstore.layout import KVLayout
from kvstore.pool.page_pool import HeapHost, PoolInfo
from kvstore.protocol import ListStoredPages, MapPool, OpenStore, PoolHandle, StoredPagesListed, StoreOpened
from mesh.address import Address, Endpoint
from mesh.errors import DeadlineExceeded, RemoteError, Superseded, Unreachable
from mesh.membership.view import Member
from mesh.transport.base import Channel
from nodes.protocol import (
    Adopt,
    Adopted,
    AttemptFailed,
    AttemptsSubmitted,
    CancelAttempts,
    HasLetGo,
    LetGo,
    StepPlan,
    StepResult,
    Submit,
    SubmitAttempts,
    TokenBatch,
)
from nodes.request import AttemptRef, RequestSpec, Sampling, StopRules
from nodes.scheduler import idle_check
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.asks import ASK_RETRY_S
from nodes.scheduler.cache_news import GATHER_S
from nodes.scheduler.config import ConfigError, SchedulerConfig
from nodes.scheduler.worker_link.pipeline import STEP_REPEAT_S
from tests.mesh.recorded_call import RecordedCall
from tests.nodes.recording_context import RecordingContext

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=4, fingerprint="weights")
CONFIG = SchedulerConfig(
    group="m", worker="w", agent="a", context_length=99, page_size=4, chunk_tokens=8, step_tokens=300,
    eos_token_ids=(1,), phase="decode",
)  # fmt: skip
W, G = Address("w", 3), Address("g", 1)

pytestmark = pytest.mark.virtual_time

Made = tuple[SchedulerActor, RecordingContext, HeapHost]
Maker = Callable[..., Made]


def member(actor_id: str, role: str, epoch: int = 1, state: str = "ready") -> Member:
    return Member(actor_id=actor_id, role=role, epoch=epoch, endpoint=Endpoint("", ""), state=state)


MEMBERS = [member("x", "detokenizer"), member("w", "worker", 3), member("late", "detokenizer", state="starting")]


@pytest.fixture
@contextlib.asynccontextmanager
async def actor() -> AsyncIterator[Maker]:
    """Makes schedulers, and stops them after the test."""
    made: list[Made] = []
    yield lambda **script: made.append(actor_of(**script)) or made[-1]
    for one, _, _ in made:
        await one.stop()
    # What was cancelled ends.
    await asyncio.sleep(0)


def actor_of(**script) -> Made:
    host = script.get("host") or HeapHost()
    info = PoolInfo(group="m", num_pages=30, layout=LAYOUT, incarnation=1)
    pool = host.create("pool", info)
    handle = PoolHandle(group="m", agent="a", path=pool.path, num_pages=30, layout=LAYOUT, incarnation=1)
    adopted = Adopted(worker_epoch=3, numerics="", vocab_size=100)
    one = SchedulerActor(script.get("config", CONFIG), host)
    answers = {
        MapPool: [*script.get("pool", ()), handle],
        Adopt: [*script.get("adopted", (adopted,))],
        OpenStore: [*script.get("store", (StoreOpened(group="m", num_pages=9),))],
        ListStoredPages: [StoredPagesListed(hashes=b"")],
    }

    async def answer(_: str, message: object) -> object:
        """Those of its type in their order, the last for ever."""
        given = answers[type(message)]
        found = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(found, Exception):
            raise found
        return found

    one.ctx = RecordingContext(Address("s", 7), answer, MEMBERS)
    return one, one.ctx, host


async def started(made: Made) -> tuple[SchedulerActor, RecordingContext]:
    """It has started, and has said so."""
    one, ctx, _ = made
    await one.start()
    await asyncio.sleep(0.01)
    return one, ctx


def submit(request_id: str = "r", stop: StopRules | None = None, **more) -> RecordedCall:
    spec = RequestSpec(Sampling(), stop or StopRules(max_tokens=2))
    fields = {"prompt_ids": [5, 6, 7], "spec": spec, **more}
    one = Submit(request_id=request_id, attempt=0, gateway="g", detokenizer="x", **fields)
    return RecordedCall(SubmitAttempts(attempts=[one]), G)


def refused_as_draining(one: SchedulerActor) -> RecordedCall:
    """A late submission."""
    late = submit("late")
    one.on_ask(late)
    ((refused,),) = (answer.refused for answer in late.answers)
    assert (refused.code, refused.retryable) == ("draining", True)
    return late


def steps(ctx: RecordingContext) -> list[StepPlan]:
    return [message for _, message in ctx.told if isinstance(message, StepPlan)]


async def test_ready_once_the_worker_is_ours(actor: Maker) -> None:
    one, ctx, _ = actor()
    call = submit()
    one.on_ask(call)
    one.on_tell(G, "early", ())
    assert (call.answers, one.stats()) == ([("not_ready", True, None)], {})
    await one.drain()
    await one.start()
    assert ctx.announced == []
    await asyncio.sleep(0.01)
    attributes = {"group": "m", "phase": "decode", "page_size": 4, "worker_ready": True, "policy": "fcfs"}
    attributes |= {"numerics": "", "asks": [], "damaged_pages": 0, "weights": "weights"}
    assert ctx.announced == [("ready", attributes)]
    adopting = [Adopt(scheduler_epoch=7), Adopt(scheduler_epoch=7, next_step=1)]
    assert [message for _, message in ctx.asked] == [MapPool(group="m"), *adopting]
    assert [topic for topic, _ in ctx.published] == ["load"]
    await asyncio.sleep(GATHER_S)
    assert [topic for topic, _ in ctx.published] == ["load", "kv_events"]


async def test_the_store_is_open_before_it_is_ready(actor: Maker) -> None:
    config = msgspec.structs.replace(CONFIG, stores="write_through")
    adopted = Adopted(worker_epoch=3, numerics="avx2", vocab_size=100)
    unreachable = [Unreachable("a is not there yet"), StoreOpened(group="m", num_pages=9)]
    one, ctx = await started(actor(config=config, adopted=(adopted,), store=unreachable))
    asked = [message for _, message in ctx.asked]
    assert asked[:4] == [MapPool(group="m"), Adopt(scheduler_epoch=7), *[OpenStore(group="m", numerics="avx2")] * 2]
    assert ctx.announced[0][0] == "ready"
    assert one.core is not None


async def test_what_is_wrong_with_the_disk_is_an_error_of_the_start(actor: Maker) -> None:
    config = msgspec.structs.replace(CONFIG, stores="write_through")
    one, ctx, _ = actor(config=config, store=(RemoteError("store_no_space", "make room"),))
    with pytest.raises(RemoteError, match="make room"):
        await one.start()
    assert (one.core, ctx.announced) == (None, [])


async def test_numerics_of_other_schedulers_are_seen(actor: Maker) -> None:
    config = msgspec.structs.replace(CONFIG, stores="write_through")
    one, ctx = await started(actor(config=config))
    other = msgspec.structs.replace(member("other", "scheduler"), attributes={"numerics": "avx512"})
    ctx.members.reset(1, 2, [*MEMBERS, other])
    one.on_members([], [], [])
    assert one.core is not None
    assert one.core.storing._seen == {"avx512"}


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
async def test_what_goes_first_is_as_the_settings_say(
    actor: Maker, eviction: EvictionName, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = []
    policy = POLICIES[eviction]
    order = policy.priority
    monkeypatch.setattr(policy, "priority", lambda self, run: ordered.append(type(self)) or order(self, run))
    one, _, _ = actor(config=msgspec.structs.replace(CONFIG, eviction=eviction))
    await one.start()
    blocks = one.core.books.cache.start([5, 6, 7, 8, 9])
    assert blocks.reserve(4)
    blocks.advance([5, 6, 7, 8])
    blocks.release()
    assert set(ordered) == {policy}


async def test_a_pool_that_was_made_again_ends_the_scheduler(actor: Maker) -> None:
    one, ctx, _ = actor()
    await one.start()
    for incarnations in ({"m": 1}, {}, {"m": 1, "n": 7}):
        agent = Member("a", "kv_agent", 2, Endpoint("", ""), attributes={"incarnations": incarnations})
        ctx.members.reset(1, 1, [*MEMBERS, agent])
        one.on_members([agent], [], [])
    assert ctx.ended == []
    agent = Member("a", "kv_agent", 3, Endpoint("", ""), attributes={"incarnations": {"m": 3}})
    ctx.members.reset(1, 1, [*MEMBERS, agent])
    one.on_members([], [], [])
    assert ctx.ended == ["a has made a new pool for m"]


async def test_supervisors_say_who_stays_away_and_nobody_else(actor: Maker) -> None:
    one, ctx, _ = actor()
    await one.start()
    core = one.core
    said = {"nonsense": {"drained": "w"}, "supervisor": {"drained": {"w": 3}}}
    for name, attributes in said.items():
        supervisor = Member(name, "supervisor", 1, Endpoint("", ""), attributes=attributes)
        ctx.members.reset(1, 1, [*MEMBERS, supervisor])
        one.on_members([], [], [supervisor])
        assert core.handlers.is_worker_drained == (name == "supervisor")
    ctx.members.reset(1, 1, [*MEMBERS, member("w", "worker", 4)])
    one.on_members([], [], [])
    assert not core.handlers.is_worker_drained


async def test_one_request(actor: Maker) -> None:
    one, ctx = await started(actor())
    first, second = submit(), submit("q", prompt_ids=[8, 9])
    one.on_ask(first)
    one.on_ask(second)
    assert steps(ctx) == [], "one step for the whole burst"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert first.answers == [AttemptsSubmitted(held=[AttemptRef("r", 0)])]
    assert [len(step.opens) for step in steps(ctx)] == [2, 0]
    told = zip(ctx.told, ctx.told_with, strict=True)
    (to, _), (buffers, channel) = next(one for one in told if isinstance(one[0][1], StepPlan))
    assert (to, [len(buffer) for buffer in buffers], channel) == ("w", [56, 20, 8], Channel.DATA)
    one.on_tell(W, StepResult(scheduler_epoch=7, step=1, token_ids=[10, 11]), ())
    batches = [message for _, message in ctx.told if isinstance(message, TokenBatch)]
    assert [batch.token_ids for batch in batches] == [[10, 11]], "a result is worked through at once"
    one.on_tell(W, StepResult(scheduler_epoch=7, step=2, token_ids=[12, 1]), ())
    await asyncio.sleep(0.2)
    assert one.stats()["mesh_scheduler_num_running"] == 0
    cancel = RecordedCall(CancelAttempts(attempts=[AttemptRef("r", 0), AttemptRef("q", 0)]), G)
    one.on_ask(cancel)
    await asyncio.sleep(0.2)
    one.core.assert_idle()
    assert {topic for topic, _ in ctx.published} == {"kv_events", "load"}


async def test_the_timer_rings_for_the_earliest_deadline(actor: Maker) -> None:
    one, ctx, _ = actor()
    await one.start()
    await asyncio.sleep(0.3)
    one.on_ask(submit())
    await asyncio.sleep(0.01)
    number = len(steps(ctx))
    await asyncio.sleep(STEP_REPEAT_S + 0.2)
    assert len(steps(ctx)) == 2 * number, "no result: the steps are sent again"
    await one.stop()
    await asyncio.sleep(60.0)
    assert len(steps(ctx)) == 2 * number


async def test_an_ask_that_fails_is_an_event(actor: Maker) -> None:
    adopted, other = (
        Adopted(worker_epoch=epoch, numerics=numerics, vocab_size=100) for epoch, numerics in ((3, "x"), (4, "y"))
    )
    one, ctx, _ = actor(adopted=[Unreachable("not yet"), DeadlineExceeded("late"), adopted, adopted, other])
    await one.start()
    await asyncio.sleep(2 * ASK_RETRY_S + 0.1)
    assert [state for state, _ in ctx.announced] == ["ready"]
    one.on_peer_lost(W, "died")
    await asyncio.sleep(0.1)
    draining = asyncio.ensure_future(one.drain())
    await asyncio.sleep(0.1)
    await draining
    assert [attributes["worker_ready"] for _, attributes in ctx.announced] == [True, False, True, True]
    numerics = [attributes["numerics"] for _, attributes in ctx.announced]
    assert numerics == ["x", "x", "y", "y"], "of its worker, or of the last one"


async def test_the_pool_is_waited_for_but_not_where_it_will_never_be(actor: Maker) -> None:
    one, ctx, _ = actor(pool=[Unreachable("not yet"), DeadlineExceeded("late")])
    await one.start()
    assert len([message for _, message in ctx.asked if isinstance(message, MapPool)]) == 3
    await one.stop()
    one, _, _ = actor(pool=[RemoteError("unknown_group", "no pool of that group")])
    with pytest.raises(RemoteError):
        await one.start()


async def test_a_pool_of_another_page_size_is_refused(actor: Maker) -> None:
    other = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=8)
    handle = PoolHandle(group="m", agent="a", path="", num_pages=30, layout=other, incarnation=1)
    one, _, _ = actor(pool=[handle])
    with pytest.raises(ConfigError, match="pages of 8 tokens, but this scheduler is set to 4"):
        await one.start()


async def test_a_damaged_page_table_is_reported_and_served_from_all_the_same(actor: Maker) -> None:
    one, ctx, host = actor()
    pool = host.open(host.path("pool"), writable=True)
    pool.table_view[:] = b"\xff" * len(pool.table_view)
    pool.table().write(1, PageEntry(PageState.CACHED, 5, 1, b"h" * 16, b"p" * 16))
    with structlog.testing.capture_logs() as logs:
        await one.start()
    assert logs[0] == {
        "event": "cache rebuilt without damaged page table entries", "log_level": "warning",
        "cached": 0, "recovered": 0, "exported": 0, "torn": 28, "dropped": 1,
    }  # fmt: skip
    refused = "mesh_scheduler_page_entries_refused_total"
    assert [ctx.metrics.value(refused, reason=reason) for reason in ("torn", "contradictory")] == [28, 1]
    one.on_ask(submit())
    await asyncio.sleep(0.01)
    assert len(steps(ctx)) > 0
    assert one.stats()['mesh_scheduler_pages{state="quarantined"}'] == 0


async def test_pages_that_are_found_damaged_are_told_and_the_scheduler_goes_on(
    actor: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_check, "IDLE_S", 0.0)
    one, ctx = await started(actor())
    assert one.core is not None
    (page,) = one.core.books.cache.blocks.allocator.allocate(1) or ()
    with structlog.testing.capture_logs() as logs:
        one.on_members([], [], [])
        async with asyncio.timeout(5):
            while not logs:
                await asyncio.sleep(0.01)
    assert logs == [
        {
            "event": "pages quarantined: the books disagreed about them", "log_level": "error",
            "number": 1, "pages": [f"{page} is RUNNING, should be FREE"],
        }
    ]  # fmt: skip
    assert ctx.announced[-1][1]["damaged_pages"] == 1
    assert one.stats()["mesh_scheduler_page_violations_total"] == 1
    one.on_ask(submit())
    await asyncio.sleep(0.01)
    assert len(steps(ctx)) > 0


async def test_draining_ends_when_nothing_is_left(actor: Maker) -> None:
    one, ctx = await started(actor())
    one.on_ask(submit())
    draining = asyncio.ensure_future(one.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    assert ctx.announced[-1][0] == "draining"
    late = refused_as_draining(one)
    for step in itertools.count(1):
        if draining.done():
            break
        one.on_tell(W, StepResult(scheduler_epoch=7, step=step, token_ids=[10]), ())
        await asyncio.sleep(0.01)
    await one.stop()
    one.on_members([], [], [])
    one.on_ask(late)
    assert late.answers[-1] == ("not_ready", True, None)


async def test_memory_that_is_wanted_back_is_given_and_attempts_too(actor: Maker) -> None:
    one, ctx = await started(actor())
    one.on_ask(submit())
    one.on_ask(submit("q"))
    await asyncio.sleep(0.01)
    assert len(steps(ctx)) > 0, "both run"
    call = RecordedCall(LetGo(group="m", number=3, weights="reload"), G)
    with structlog.testing.capture_logs() as logs:
        one.on_ask(call)
    said = [(line["request_id"], line["code"]) for line in logs if line["event"] == "attempt failed"]
    assert said == [("r", "memory_released"), ("q", "memory_released")]
    assert call.answers == [HasLetGo(group="m", number=3)]
    failed = [(to, it.code, it.retryable) for to, it in ctx.told if isinstance(it, AttemptFailed)]
    assert failed == [("g", "memory_released", True)] * 2
    assert ctx.ended == ["the memory of m is released"]
    refused_as_draining(one)


async def test_a_scheduler_without_memory_waits_for_it(actor: Maker) -> None:
    released = RemoteError("memory_released", "the memory of m is released", retryable=True)
    one, ctx, _ = actor(pool=[released, released])
    starting = asyncio.ensure_future(one.start())
    await asyncio.sleep(0.01)
    known = {"group": "m", "phase": "decode", "page_size": 4}
    assert ctx.announced == [("released", known)]
    one.on_members([], [], [])
    await starting
    await asyncio.sleep(0.01)
    announced = [state for state, _ in ctx.announced][-3:]
    assert announced == ["released", "starting", "ready"], "it maps the pool in between"


async def test_a_pool_that_was_released_while_its_place_was_told_is_asked_for_again(actor: Maker) -> None:
    host = HeapHost()
    old = host.create("old", PoolInfo(group="m", num_pages=30, layout=LAYOUT, incarnation=1, weights="keep"))
    outdated = PoolHandle(group="m", agent="a", path=old.path, num_pages=30, layout=LAYOUT, incarnation=1)
    one, ctx, _ = actor(pool=[outdated], host=host)
    await one.start()
    assert [type(message) for _, message in ctx.asked[:3]] == [MapPool, MapPool, Adopt]


@pytest.mark.parametrize("waits_for", ["adopted", "store"])
async def test_a_scheduler_that_is_starting_lets_go_and_begins_again(actor: Maker, waits_for: str) -> None:
    busy = RemoteError("not_ready", "it is still being loaded", retryable=True)
    script = {
        "adopted": [Adopted(worker_epoch=3, numerics="", vocab_size=100)],
        "store": [StoreOpened(group="m", num_pages=9)],
    }
    script[waits_for].insert(0, busy)
    one, ctx, _ = actor(config=msgspec.structs.replace(CONFIG, stores="write_through"), **script)
    starting = asyncio.ensure_future(one.start())
    await asyncio.sleep(0.01)
    mapped = one._pool
    call = RecordedCall(LetGo(group="m", number=1, weights="keep"), G)
    one.on_ask(call)
    assert call.answers == [HasLetGo(group="m", number=1)]
    await starting
    assert one._pool is not mapped
    with pytest.raises(PoolClosed):
        mapped.table()
    first = [MapPool, Adopt] if waits_for == "adopted" else [MapPool, Adopt, OpenStore]
    assert [type(message) for _, message in ctx.asked[: len(first) + 3]] == [*first, MapPool, Adopt, OpenStore]
    assert ctx.ended == []


async def test_a_scheduler_whose_worker_has_let_go_unmaps_before_it_says_that_it_is_released(actor: Maker) -> None:
    released = RemoteError("memory_released", "the memory of m is released", retryable=True)
    _, ctx = await started(actor(adopted=[released, Adopted(worker_epoch=3, numerics="", vocab_size=100)]))
    assert [state for state, _ in ctx.announced] == ["ready"]
    assert [type(message) for _, message in ctx.asked[:4]] == [MapPool, Adopt, MapPool, Adopt]


async def test_a_scheduler_with_an_epoch_of_long_ago_says_above_which_the_next_one_goes(actor: Maker) -> None:
    refused = RemoteError("stale_epoch", "scheduler epoch 7 is over", known_epoch=86_400)
    one, _, _ = actor(adopted=[refused])
    with pytest.raises(Superseded) as caught:
        await one.start()
    assert caught.value.known_epoch == 86_400


async def test_a_worker_on_another_making_of_the_pool_is_not_taken_over(actor: Maker) -> None:
    adopted = Adopted(worker_epoch=3, numerics="", vocab_size=100, incarnation=1)
    elsewhere = msgspec.structs.replace(adopted, incarnation=2)
    one, ctx, _ = actor(adopted=[elsewhere, adopted, adopted, elsewhere])
    await one.start()
    assert [type(message) for _, message in ctx.asked] == [MapPool, Adopt, MapPool, Adopt], "it begins again"
    await asyncio.sleep(0.01)
    assert ctx.announced[-1][0] == "ready"
    one.on_peer_lost(W, "gone")
    await asyncio.sleep(0.01)
    assert ctx.ended == ["w computes on another pool of m than the one mapped here"]
