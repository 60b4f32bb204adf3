"""The kv_agent among other actors, on the simulated network and on real files."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PoolBusy, PoolMissing
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.page_pool import HeapHost, MemoryHost, PoolInfo, ShmHost
from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    GrantsOpened,
    MapPool,
    PagesPulled,
    PoolHandle,
    TransferFailed,
)
from mesh.address import Address
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import ConfigError, KVAgentConfig, PoolConfig
from nodes.protocol import Load
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.two_schedulers import (
    LAYOUT,
    NUM_PAGES,
    SIZE,
    Nonsense,
    SlowAgent,
    World,
    config,
    grant,
    maps_others,
    ready,
)

pytestmark = pytest.mark.virtual_time


async def pull(world: World, source_agent: str, agent: str = "agent-0") -> None:
    """Move three pages in two announcements, and look at them."""
    source, from_pool = await world.pool(world.p, source_agent, "p")
    _, to_pool = await world.pool(world.d, agent, "d")
    from_pool.pages_view[:] = random.Random(3).randbytes(len(from_pool.pages_view))
    assert await world.ask(world.d, agent, grant([4, 5, 2])) == GrantsOpened(opened=["g"])
    world.p.announce(agent, ready(source, [8, 9], total=3))
    world.p.announce(agent, ready(source, [3], first=2, total=3))
    end = PagesPulled(grant_id="g", num_pages=3, complete=True)
    assert await world.d.ends() == end
    assert end not in world.p.heard, "it hears of it as D cancels its order"
    world.p.announce(agent, ready(source, [3], first=2, total=3))
    assert await world.p.ends() == end
    for page, copied in ((8, 4), (9, 5), (3, 2)):
        assert to_pool.page(copied) == from_pool.page(page)
    assert await world.ask(world.d, agent, CloseGrant(grant_id="g")) == GrantClosed(grant_id="g")


async def test_pages_move_between_pools_of_one_agent(world: World) -> None:
    [agent] = await world.agents(config("d", "p"))
    await pull(world, "agent-0")
    figures = agent.stats()
    assert figures["mesh_kv_transfer_bytes_total"] == figures['mesh_kv_pulled_bytes_total{transport="shm"}'] == 3 * SIZE
    assert figures["mesh_kv_transfer_pages_total"] == 3
    assert (figures['mesh_kv_pool_pages{group="d"}'], figures["mesh_kv_grants_open"]) == (NUM_PAGES - 1, 0)
    members = world.d.ctx.members.by_role("kv_agent")
    incarnations = {"d": 1, "p": 1}
    expected = {"groups": ["d", "p"], "transports": ["shm"], "incarnations": incarnations, "released": []}
    assert members[0].attributes == expected


async def test_pages_of_another_agent_are_mapped_and_pulled(world: World) -> None:
    near, far = await world.agents(config("d"), config("p"))
    await pull(world, "agent-1")
    assert (near.stats()["mesh_kv_foreign_pools"], far.stats()["mesh_kv_transfers_total"]) == (1, 0)
    world.network.crash(Address("agent-1", 1))
    await until(lambda: not near.stats()["mesh_kv_foreign_pools"], 30.0)


@pytest.mark.parametrize(
    ("agent_id", "code"), [("agent-9", "unreachable"), ("agent-1", "pool_missing"), ("nonsense", "bad_answer")]
)
async def test_a_source_that_cannot_be_read_fails_the_transfer(world: World, agent_id: str, code: str) -> None:
    far = KVAgent(config("p"), world.host)
    await world.start(KVAgent(config("d"), world.host), far)
    await world.add("nonsense", Nonsense())
    source, _, _ = await world.pools("agent-1")
    await world.sees("agent-0", "nonsense")
    world.host.unlink(source.path)
    await world.ask(world.d, "agent-0", grant([1]))
    world.p.announce("agent-0", ready(msgspec.structs.replace(source, agent=agent_id), [1]))
    for scheduler in (world.d, world.p):
        assert await scheduler.fails() == code


async def test_closing_during_a_long_copy_is_answered_when_it_is_quiet(world: World) -> None:
    await world.agents(config("d", "p", quantum_bytes=1), kind=SlowAgent)
    source, from_pool, to_pool = await world.pools()
    from_pool.pages_view[:] = b"\1" * len(from_pool.pages_view)
    await world.order(source, [1, 2], [1, 2])
    while not any(to_pool.pages_view):
        await asyncio.sleep(0.0005)
    assert await world.ask(world.d, "agent-0", CloseGrant(grant_id="g")) == GrantClosed(grant_id="g")
    after = bytes(to_pool.pages_view)
    assert not all(to_pool.page(2))
    await asyncio.sleep(1.0)
    assert bytes(to_pool.pages_view) == after, "nothing is written after GrantClosed"
    end = await world.p.until(lambda message: isinstance(message, TransferFailed))
    assert end.code == "grant_closed"


async def test_a_page_that_moves_on_during_the_copy_fails_it(world: World) -> None:
    [agent] = await world.agents(config("d", "p", quantum_bytes=1), kind=SlowAgent)
    source, from_pool, to_pool = await world.pools()
    from_pool.pages_view[:] = b"\1" * len(from_pool.pages_view)
    await world.order(source, [3], [1])
    while not any(to_pool.pages_view):
        await asyncio.sleep(0.0005)
    from_pool.table().write(3, PageEntry(PageState.RUNNING, generation=8))
    assert await world.d.fails() == "stale_pages"
    assert agent.stats()['mesh_kv_transfer_failures_total{code="stale_pages"}'] == 1


async def test_a_grant_without_announcement_runs_out_and_is_told_until_closed(world: World) -> None:
    await world.agents(config("d"))
    await world.ask(world.d, "agent-0", grant([1], timeout_s=3.0))
    started = world.d.ctx.now()
    end = await world.d.ends()
    assert await world.d.fails() == "deadline_exceeded"
    assert world.d.ctx.now() - started == pytest.approx(3.0, abs=0.2)
    await asyncio.sleep(1.2)
    assert world.d.heard == [end] * 3
    await world.ask(world.d, "agent-0", CloseGrant(grant_id="g"))
    await asyncio.sleep(3)
    assert len(world.d.heard) == 3


async def test_a_lost_holder_loses_its_grants(world: World) -> None:
    [agent] = await world.agents(config("d"))
    await world.ask(world.d, "agent-0", grant([1], timeout_s=1000.0))
    assert agent.stats()["mesh_kv_grants_open"] == 1
    world.network.crash(Address("D", 1))
    started = world.p.ctx.now()
    await until(lambda: not agent.stats()["mesh_kv_grants_open"], 30.0)
    assert world.p.ctx.now() - started < 10.0


async def test_refusals_and_what_is_not_served(world: World) -> None:
    await world.agents(config("d"))
    for message, code in (
        (MapPool(group="x"), "unknown_group"),
        (grant([0]), "bad_grant"),
        (PoolHandle(group="d", agent="a", path="", num_pages=2, layout=LAYOUT, incarnation=1), "not_served"),
    ):
        with pytest.raises(RemoteError) as caught:
            await world.ask(world.d, "agent-0", message)
        assert caught.value.code == code
    load = Load(num_running=0, num_waiting=0, num_free_pages=0, num_pages=0)
    world.d.ctx.tell("agent-0", load)
    world.p.announce("agent-0", ready(await world.ask(world.d, "agent-0", MapPool(group="d")), [1]))
    assert await world.p.fails() == "unknown_grant"


async def test_draining_waits_for_open_grants_and_takes_no_more(world: World) -> None:
    [agent] = await world.agents(config("d"))
    await agent.drain()
    idle = KVAgent(config("e"), world.host)
    await world.add("agent-1", idle)
    await world.sees("D", "agent-1")
    await world.ask(world.d, "agent-1", grant([1], timeout_s=2.0, group="e"))
    started = world.d.ctx.now()
    await idle.drain()
    assert world.d.ctx.now() - started > 1.0
    with pytest.raises(RemoteError, match="draining"):
        await world.ask(world.d, "agent-1", grant([1], "h", group="e"))


async def test_an_ask_that_was_given_up_is_not_answered(world: World) -> None:
    [agent] = await world.agents(config("d", "p", quantum_bytes=1), kind=SlowAgent)
    source, _, _ = await world.pools()
    await world.order(source, [1, 2], [1, 2])
    while not agent.pulls.is_busy:
        await asyncio.sleep(0.0005)
    closing = asyncio.ensure_future(world.ask(world.d, "agent-0", CloseGrant(grant_id="g")))
    while not agent.core._closing:
        await asyncio.sleep(0.0001)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await until(lambda: not agent.stats()["mesh_kv_grants_open"], 30.0)
    assert agent.ctx.metrics.value("mesh_answers_ignored_total") == 1, "nobody waits for it any more"
    assert (await world.ask(world.d, "agent-0", MapPool(group="d"))).group == "d", "it goes on when the copy has ended"


async def test_a_source_that_is_lost_when_it_has_just_answered_is_not_mapped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = await world.agents(config("d"), config("p"))
    source, _, _ = await world.pools("agent-1")
    ask = near.ctx.ask

    async def ask_and_lose(*arguments: Any, **options: Any) -> Any:
        answer = await ask(*arguments, **options)
        near.on_peer_lost(Address("agent-1", 1), "its lease ran out")
        return answer

    monkeypatch.setattr(near.ctx, "ask", ask_and_lose)
    await world.order(source, [1], [1])
    assert await world.d.fails() == "source_lost"
    assert not maps_others(near)


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_source_pool_that_changed_between_announcement_and_copy(world: World, is_gone: bool) -> None:
    [agent] = await world.agents(config("d", "p"))
    source, _, _ = await world.pools()
    world.host.unlink(source.path)
    if not is_gone:
        info = PoolInfo(group="p", num_pages=NUM_PAGES, layout=LAYOUT, incarnation=99)
        world.host.create("kvmesh-p", info)
    await world.order(source, [1], [1])
    assert await world.d.fails() == ("pool_missing" if is_gone else "source_changed")
    assert agent.stats()["mesh_kv_grants_open"] == 0


async def test_pages_that_moved_on_before_the_copy(world: World) -> None:
    await world.agents(config("d", "p"))
    source, from_pool, to_pool = await world.pools()
    from_pool.pages_view[:] = b"\1" * len(from_pool.pages_view)
    to_pool.table().write(1, PageEntry(PageState.RUNNING, generation=8))
    await world.order(source, [1], [1])
    assert await world.d.fails() == "stale_pages"
    assert not any(to_pool.pages_view)


# taking possession


async def started(host: MemoryHost, settings: KVAgentConfig, epoch: int) -> KVAgent:
    """An agent with nobody around it."""
    world = World()
    world.host = host
    agent = KVAgent(settings, host)
    await world.add("registry", RegistryActor())
    await world.add("agent-0", agent, epoch)
    return agent


@pytest.fixture(params=["shm", "heap"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryHost:
    return ShmHost(tmp_path) if request.param == "shm" else HeapHost()


def crash(agent: KVAgent) -> None:
    """What kill -9 does to an agent's pools: the lock goes, the segment stays."""
    for [pool] in agent.ranks.values():
        pool.close()


async def test_an_orderly_stop_takes_the_segments_away(host: MemoryHost) -> None:
    agent = await started(host, config("d", prefix="kv-"), 1)
    assert host.open(host.path("kv-d"), writable=False).info.incarnation == 1
    await agent.stop()
    with pytest.raises(PoolMissing):
        host.open(host.path("kv-d"), writable=False)
    again = await started(host, config("d", prefix="kv-", unlink_on_stop=False), 2)
    await again.stop()
    host.open(host.path("kv-d"), writable=False).close()


async def test_the_next_agent_reopens_what_a_killed_one_left(host: MemoryHost) -> None:
    first = await started(host, config("d", "p"), 3)
    first.ranks["d"][0].page(2)[:4] = b"kept"
    crash(first)
    second = await started(host, config("d", "p"), 4)
    assert bytes(second.ranks["d"][0].page(2)[:4]) == b"kept"
    assert second.ranks["d"][0].info.incarnation == 3
    crash(second)
    bigger = config("d", pools=[PoolConfig(group="d", num_pages=NUM_PAGES + 1, layout=LAYOUT)])
    third = await started(host, bigger, 5)
    assert not any(third.ranks["d"][0].page(2))
    assert third.ranks["d"][0].info.incarnation == 5
    crash(third)


async def test_damaged_and_foreign_leftovers_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "kvmesh-d").write_bytes(b"something else altogether" * 1000)
    (tmp_path / "kvmesh-p").write_bytes(b"")
    agent = await started(ShmHost(tmp_path), config("d", "p"), 1)
    assert agent.ranks["d"][0].num_pages == agent.ranks["p"][0].num_pages == NUM_PAGES
    await agent.stop()
    assert list(tmp_path.iterdir()) == []


async def test_a_pool_whose_owner_lives_stops_the_start(tmp_path: Path) -> None:
    first = await started(ShmHost(tmp_path), config("d"), 1)
    with pytest.raises(PoolBusy):
        await started(ShmHost(tmp_path), config("d"), 1)
    await first.stop()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PoolConfig(group="a/b", num_pages=2, layout=LAYOUT), "names a file"),
        (lambda: PoolConfig(group="a", num_pages=1, layout=LAYOUT), "at least 2 pages"),
        (lambda: config("a", "a"), "must differ, got a, a"),
        (lambda: config("a", prefix="/etc/"), "prefix"),
    ],
)
def test_settings_that_cannot_be_used(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_files_are_the_default(tmp_path: Path) -> None:
    agent = KVAgent(config("d", directory=str(tmp_path)))
    assert isinstance(agent._host, CudaHost)
    assert agent._host.path("x") == str(tmp_path / "x")
