"""The kv_agent with pools on devices, over a fake of them, among other actors on the simulated network."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import DeviceExhaustedMemory, DeviceUnavailable, PoolBusy, PoolMissing
from kvstore.pool.page_pool import HeapHost, MemoryHost, ShmHost
from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    MapPool,
    PagesPulled,
)
from kvstore.transfer.paired.tcp.link import TcpSettings
from kvstore.transfer.selection import Selection
from mesh.address import Address
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import ConfigError, PoolConfig
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.agent_world import World, config, in_world
from tests.nodes.kv_agent.two_schedulers import LAYOUT, NUM_PAGES, SIZE


@pytest.fixture
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryHost:
    """Where page tables are: in this process, or in files where a test says so."""
    return ShmHost(tmp_path) if getattr(request, "param", "") == "files" else HeapHost()


@pytest.fixture
def world(tables: MemoryHost) -> Callable[..., None]:
    return in_world(tables)


@pytest.mark.parametrize("num_agents", [1, 2])
async def test_pages_move_between_pools_on_devices(world: World, num_agents: int) -> None:
    if num_agents == 1:
        near = await world.agent("agent-0", config("cuda:0", "d", "p"))
    else:
        near = await world.agent("agent-0", config("cuda:0", "d"))
        await world.agent("agent-1", config("cuda:1", "p"))
    await world.settle(2 + num_agents)
    source, from_pool = await world.pool(f"agent-{num_agents - 1}", "p")
    _, to_pool = await world.pool("agent-0", "d")
    assert source.device == ("cuda:0" if num_agents == 1 else "cuda:1")
    from_bytes, to_bytes = world.worker.bytes_of(from_pool), world.worker.bytes_of(to_pool)
    from_bytes[:] = random.Random(3).randbytes(len(from_bytes))
    await world.move_three(source, from_bytes, to_bytes)
    figures = near.stats()
    assert figures["mesh_kv_transfer_bytes_total"] == 3 * SIZE
    assert figures['mesh_kv_pool_bytes{group="d"}'] == to_pool.info.pages_offset + NUM_PAGES * SIZE
    members = world.scheduler.ctx.members.by_role("kv_agent")
    assert {name for member in members for name in member.attributes["transports"]} == {"cuda_ipc"}
    for pool in (from_pool, to_pool):
        pool.close()
    await world.stop()
    assert world.cards.allocations == [], "agents free what they made"
    assert all(process.memory.num_open == 0 for process in world.processes.values())


async def test_pages_of_another_agent_come_by_nccl_where_that_is_chosen(world: World) -> None:
    configs = config("cuda:0", "d", "q", device_transport="nccl"), config("cuda:1", "p", device_transport="nccl")
    await world.move_three(*await world.two(*configs))
    near, far = world.actors["agent-0"], world.actors["agent-1"]
    for member in world.scheduler.ctx.members.by_role("kv_agent"):
        assert member.attributes["transports"] == ["cuda_ipc", "nccl"]
    assert (world.wire.num_ids, near.stats()["mesh_kv_transfer_bytes_total"]) == (1, 3 * SIZE)
    assert world.processes["agent-0"].memory.num_open == 0, "no handle is opened"
    world.network.crash(Address("agent-0", 1))
    while far.transports.far["cuda"][0]._halves:
        await asyncio.sleep(0.1)


async def test_pools_of_one_agent_are_copied_on_the_device_all_the_same(world: World) -> None:
    await world.agent("agent-0", config("cuda:0", "d", "p", device_transport="nccl"))
    await world.settle(3)
    source, _, _ = await world.pools("agent-0")
    await world.order(source, "agent-0", [8], [4])
    assert await world.scheduler.ends() == PagesPulled(grant_id="g", num_pages=1, complete=True)
    assert world.wire.num_ids == 0


async def test_an_agent_without_nccl_is_not_reached_in_another_way(world: World) -> None:
    source, _, _ = await world.two(config("cuda:0", "d", device_transport="nccl"), config("cuda:1", "p"))
    await world.order(source, "agent-0", [8], [4])
    assert await world.scheduler.fails("no pair with agent-1") == "not_served"


async def test_a_fallback_is_announced_counted_and_withdrawn(world: World) -> None:
    choice = {"device_transport": "nccl", "device_fallback": "tcp", "pair_timeout_s": 2.0}
    choices = config("cuda:0", "d", **choice), config("cuda:1", "p", device_transport="tcp")
    await world.move_three(*await world.two(*choices))
    near = world.actors["agent-0"]

    async def announced() -> dict[str, Any]:
        await asyncio.sleep(1.0)
        [member] = [one for one in world.scheduler.ctx.members.all() if one.address.actor_id == "agent-0"]
        return member.attributes

    attributes = await announced()
    assert attributes["transports"] == ["cuda_ipc", "nccl", "tcp"]
    assert attributes["fallbacks"]["agent-1"].startswith("tcp instead of nccl: no pair with agent-1")
    figures = near.stats()
    assert (figures["mesh_kv_pairs_on_fallback"], figures["mesh_kv_fallbacks_total"]) == (1.0, 1.0)
    world.network.crash(Address("agent-1", 1))
    await until(lambda: not near.stats()["mesh_kv_pairs_on_fallback"], 30.0)
    assert (await announced())["fallbacks"] == {}


@pytest.mark.parametrize("dies", ["agent-0", "agent-1"])
async def test_an_agent_that_dies_in_the_middle_of_a_transfer(world: World, dies: str) -> None:
    world.wire.is_slow = True
    configs = config("cuda:0", "d", device_transport="nccl"), config("cuda:1", "p", device_transport="nccl")
    source, _, _ = await world.two(*configs)
    await world.order(source, "agent-0", [8], [4])
    while not all(link.waiting for link in world.wire.links) or len(world.wire.links) < 2:
        await asyncio.sleep(0.01)
    world.network.crash(Address(dies, 1))
    survivor = world.actors["agent-0" if dies == "agent-1" else "agent-1"]
    await until(lambda: not survivor.pulls.is_busy, 30.0)
    if dies == "agent-1":
        await world.scheduler.ends()
        assert await world.ask("agent-0", CloseGrant(grant_id="g")) == GrantClosed(grant_id="g")
        assert world.scheduler.heard[-1].code == "source_lost"
        assert world.wire.links[0].is_aborted


async def test_a_grant_is_closed_when_the_device_has_done_what_it_was_told(world: World) -> None:
    world.cards.copies_per_look = 0
    await world.agent("agent-0", config("cuda:0", "d", "p"))
    await world.settle(3)
    source, _, _ = await world.pools("agent-0")
    await world.order(source, "agent-0", [1, 2], [3, 4])
    await until(lambda: world.cards.num_waiting)
    closing = asyncio.ensure_future(world.ask("agent-0", CloseGrant(grant_id="g")))
    await asyncio.sleep(1.0)
    assert not closing.done(), "a copy may still write"
    world.cards.run()
    assert await closing == GrantClosed(grant_id="g")


@pytest.mark.parametrize(("near", "far"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
async def test_pools_of_two_kinds_of_memory_are_refused(world: World, near: str, far: str) -> None:
    source, _, _ = await world.two(config(near, "d"), config(far, "p"))
    await world.order(source, "agent-0", [1], [2])
    assert await world.scheduler.fails(f"pages on {far} cannot be copied by this agent") == "pages_elsewhere"


async def test_so_are_those_of_one_agent_that_has_both(world: World) -> None:
    pools = [
        PoolConfig(group="d", num_pages=NUM_PAGES, layout=LAYOUT, device="cuda:0"),
        PoolConfig(group="p", num_pages=NUM_PAGES, layout=LAYOUT),
    ]
    await world.agent("agent-0", config("", pools=pools))
    await world.settle(3)
    [member] = world.scheduler.ctx.members.by_role("kv_agent")
    assert member.attributes["transports"] == ["cuda_ipc", "shm"]
    source, _, _ = await world.pools("agent-0")
    await world.order(source, "agent-0", [1], [2])
    assert await world.scheduler.fails("pages on cpu cannot be copied to cuda:0") == "mixed_memory"


@pytest.mark.parametrize("tables", ["files", "heap"], indirect=True)
async def test_the_next_agent_makes_the_pool_again(world: World) -> None:
    first = await world.agent("agent-0", config("cuda:0", "d", unlink_on_stop=False), epoch=1)
    await world.settle(3)
    old, pool = await world.pool("agent-0", "d")
    _ = pool.device_pages
    world.network.crash(Address("agent-0", 1))
    # What kill -9 does: its memory on the device goes, the lock goes, the file stays.
    first.ranks["d"][0].close()
    await world.agent("agent-0", config("cuda:0", "d"), epoch=2)
    assert (await world.sees("S", "agent-0", 2)).attributes["incarnations"] == {"d": 2}
    new = await world.ask("agent-0", MapPool(group="d"))
    assert (old.incarnation, new.incarnation) == (1, 2)
    mapped = world.worker.host.open(new.path, writable=True)
    assert not any(world.worker.bytes_of(mapped))
    pool.close()
    mapped.close()


async def test_a_device_that_fails_under_what_is_sent_to_others_ends_the_agent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await world.agent("agent-0", config("cuda:0", "d"))
    ends: list[str] = []
    agent.ctx.fail = ends.append
    agent._pump()
    assert ends == []
    monkeypatch.setattr(Selection, "device_failure", "an illegal address")
    agent._pump()
    assert ends == ["a device failed: an illegal address"]


async def test_a_device_that_fails_ends_the_agent(world: World) -> None:
    world.cards.copies_per_look = 0
    agent = await world.agent("agent-0", config("cuda:0", "d", "p"))
    ends: list[str] = []
    agent.ctx.fail = ends.append
    await world.settle(3)
    source, _, _ = await world.pools("agent-0")
    await world.order(source, "agent-0", [1], [2])
    await until(lambda: world.cards.num_waiting)
    world.cards.fault = "an illegal address"
    assert await world.scheduler.fails() == "device_fault"
    assert ends == ["a device failed: an illegal address"]
    await agent.stop()
    with pytest.raises(PoolMissing):
        world.tables.open(source.path, writable=False)
    del world.systems["agent-0"]


async def test_a_start_that_cannot_be(world: World) -> None:
    world.cards.num_bytes = 1000
    with pytest.raises(DeviceExhaustedMemory):
        await world.agent("agent-0", config("cuda:0", "d"))
    with pytest.raises(DeviceUnavailable):
        await world.agent("agent-1", config("cuda:7", "d"))


async def test_a_start_waits_for_memory_that_others_are_about_to_let_go(world: World) -> None:
    """A pool fills its device. A worker that maps the pages of a dead agent keeps them until it ends too."""

    num_bytes, world.cards.num_bytes = world.cards.num_bytes, 1000
    begin = asyncio.get_running_loop().time()
    asyncio.get_running_loop().call_later(3.0, setattr, world.cards, "num_bytes", num_bytes)
    agent = await world.agent("agent-0", config("cuda:0", "d"))
    assert 3.0 <= asyncio.get_running_loop().time() - begin < 4.0
    await agent.stop()


@pytest.mark.parametrize("tables", ["files"], indirect=True)
async def test_a_pool_whose_owner_lives_stops_the_start(world: World) -> None:
    await world.agent("agent-0", config("cuda:0", "d"))
    with pytest.raises(PoolBusy):
        await world.agent("agent-1", config("cuda:0", "d"))
    assert len(world.cards.allocations) == 1


def test_settings_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="pool of d: there is no device called 'gpu'"):
        config("gpu", "d")
    for change, why in (
        (
            {"device_transport": "shm"},
            "device_transport must be 'cuda_ipc', 'nccl' or 'tcp', or the name .*, not 'shm'",
        ),
        ({"host_transport": "nccl"}, "host_transport must be 'shm' or 'tcp', or the name .*, not 'nccl'"),
        ({"device_transport": "nccl", "device_fallback": "shm"}, "device_fallback must be empty or 'tcp', not 'shm'"),
        ({"device_fallback": "tcp"}, "device_fallback needs device_transport 'nccl', not 'cuda_ipc'"),
        ({"tcp": TcpSettings(host="0.0.0.0")}, "means every address"),
        ({"tcp": TcpSettings(host="10.0.0.1")}, "set trusted_network"),
        ({"tcp": TcpSettings(host="a name")}, "is neither an IP address nor a name"),
        ({"tcp": TcpSettings(bind="d.example")}, "bind 'd.example' is not an IP address"),
        ({"tcp": TcpSettings(bind="0.0.0.0", host="127.0.0.1")}, "over 0.0.0.0 unencrypted: set trusted_network"),
        ({"tcp": TcpSettings(host="d.example")}, "over d.example unencrypted: set trusted_network"),
        ({"tcp": TcpSettings(port=70000)}, "port must be 0 to 65535"),
        ({"tcp": TcpSettings(num_streams=17)}, "num_streams must be 1 to 16"),
        ({"tcp": TcpSettings(chunk_bytes=1)}, "chunk_bytes must be 65536 to"),
    ):
        with pytest.raises(ConfigError, match=why):
            config("cuda:0", "d", **change)
    config("cuda:0", "d", tcp=TcpSettings(host="10.0.0.1", trusted_network=True), device_transport="tcp")
    config("cpu", "d", tcp=TcpSettings(host="d.example", bind="::", trusted_network=True), host_transport="tcp")
    with pytest.raises(ConfigError, match="give the pools a device"):
        config("cpu", "d", device_transport="nccl")
    with pytest.raises(TypeError, match="need a CudaHost, not a HeapHost"):
        KVAgent(config("cuda:0", "d"), HeapHost())
