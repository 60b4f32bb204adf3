"""Agents whose pages go over real TCP connections of this host; mesh and scheduler are those of the simulation."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvstore.errors import TransferError
from kvstore.protocol import CloseGrant, GrantClosed, MapPool, PagesPulled, PoolHandle
from kvstore.transfer.paired.tcp.link import TcpSettings
from mesh.address import Address
from nodes.kv_agent.config import KVAgentConfig
from tests.kvstore.fake_links import FakeLinks
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.agent_world import World, config, in_world
from tests.nodes.kv_agent.two_schedulers import NUM_PAGES, SIZE, ranks_of

TCP = TcpSettings(num_streams=2, chunk_bytes=1 << 16)


@pytest.fixture
def world() -> Callable[..., None]:
    return in_world(has_sockets=True)


def by_tcp(device: str, *groups: str, **changes: Any) -> KVAgentConfig:
    settings = {"tcp": TCP, "host_transport" if device == "cpu" else "device_transport": "tcp"}
    return config(device, *groups, **(settings | changes))


async def two(world: World, device: str = "cpu", **changes: Any) -> tuple[PoolHandle, memoryview, memoryview]:
    return await world.two(by_tcp(device, "d", **changes), by_tcp(device, "p", **changes))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
async def test_pages_of_another_agent_come_by_tcp(world: World, device: str) -> None:
    await world.move_three(*await two(world, device))
    expected = ["shm", "tcp"] if device == "cpu" else ["cuda_ipc", "tcp"]
    for member in world.scheduler.ctx.members.by_role("kv_agent"):
        assert member.attributes["transports"] == expected
    assert all(process.memory.num_open == 0 for process in world.processes.values()), "no handle is opened"


async def test_strangers_at_the_port_are_counted_and_logged_once(world: World) -> None:
    name = 'mesh_kv_connections_refused_total{why="not_ours"}'
    with capture_logs() as log:
        await two(world)
        near = world.actors["agent-0"]
        port = near.transports.far["cpu"][0]._links._listener.port
        for number in range(1, 4):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n" + bytes(64))
            await until(lambda number=number: near.stats().get(name) == number)
            writer.close()
        await asyncio.sleep(0.01)
    assert [line["why"] for line in log if line["event"] == "kv_connection_refused"] == ["not_ours"]


async def test_an_agent_that_dies_before_it_has_sent(world: World) -> None:
    source, _, _ = await two(world, pair_timeout_s=30.0)
    world.network.crash(Address("agent-1", 1))
    await world.order(source, "agent-0", [8], [4])
    await world.scheduler.fails()
    await until(lambda: not world.actors["agent-0"].pulls.is_busy, 30.0)


async def test_a_source_that_does_not_listen_to_tcp_is_not_reached_in_another_way(world: World) -> None:
    source, _, _ = await world.two(by_tcp("cpu", "d"), config("cpu", "p"))
    await world.order(source, "agent-0", [8], [4])
    assert await world.scheduler.fails() == "not_served"


async def test_a_transfer_that_is_late_is_quiet_when_its_threads_have_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, to_bytes = await two(world)
    # The source's half meets nobody and sends nothing, as one does whose process was stopped.
    idle = FakeLinks(world.wire, world.worker.memory, "tcp").link("cpu", b"", 1)
    monkeypatch.setattr(world.actors["agent-1"].transports.far["cpu"][0]._links, "link", lambda *_: idle)
    await world.order(source, "agent-0", [8], [4], timeout_s=1.0)
    await world.scheduler.fails()
    assert await world.ask("agent-0", CloseGrant(grant_id="g")) == GrantClosed(grant_id="g")
    assert not any(to_bytes)


async def test_a_pool_that_is_withdrawn_is_not_sent_and_offered_again_it_is(world: World) -> None:
    source, _, _ = await two(world)
    far = world.actors["agent-1"]
    assert not far.transports.is_sending("p")
    far.transports.withdraw("p")
    await world.order(source, "agent-0", [8], [4])
    assert await world.scheduler.fails() == "unknown_group"
    far.transports.register(far.ranks["p"][0])
    world.scheduler.heard.clear()
    await world.order(source, "agent-0", [8], [4], grant_id="again")
    assert await world.scheduler.ends() == PagesPulled(grant_id="again", num_pages=1, complete=True)


async def test_an_agent_whose_address_is_not_there_does_not_start(world: World) -> None:
    settings = config("cpu", "d", host_transport="tcp", tcp=TcpSettings(host="192.0.2.1", trusted_network=True))
    with pytest.raises(TransferError, match=r"192\.0\.2\.1") as caught:
        await world.agent("agent-0", settings)
    assert caught.value.code == "tcp_unavailable"


async def test_pools_of_one_agent_are_copied_in_memory_all_the_same(world: World) -> None:
    agent = await world.agent("agent-0", by_tcp("cpu", "d", "p"))
    await world.settle(3)
    source, _, _ = await world.pools("agent-0")
    await world.order(source, "agent-0", [8], [NUM_PAGES - 1])
    assert await world.scheduler.ends() == PagesPulled(grant_id="g", num_pages=1, complete=True)
    assert not agent.transports.far["cpu"][0]._halves


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("source_tp", "destination_tp"), [(2, 2), (2, 1)])
async def test_ranks_of_another_agent(world: World, device: str, source_tp: int, destination_tp: int) -> None:
    """Rank by rank, each pool's pages by themselves, under the generations of rank 0; nothing is cut on its way."""

    async def bytes_of(world: World, agent: str, group: str, rank: int) -> memoryview:
        handle = await world.ask(agent, MapPool(group=group, rank=rank))
        return world.worker.bytes_of(world.worker.host.open(handle.path, writable=True))

    pools = ranks_of("d", destination_tp, device), ranks_of("p", source_tp, device)
    source, _, _ = await world.two(*(by_tcp(device, pools=one) for one in pools))
    sent = [await bytes_of(world, "agent-1", "p", rank) for rank in range(source_tp)]
    for rank, content in enumerate(sent):
        content[:] = random.Random(rank).randbytes(len(content))
    await world.order(source, "agent-0", [8, 9, 3], [4, 5, 2])
    end = await world.scheduler.ends()
    if source_tp != destination_tp:
        assert end.code == "unequal_ranks"
        return
    assert end == PagesPulled(grant_id="g", num_pages=3, complete=True)
    size = SIZE // source_tp
    for rank, content in enumerate(sent):
        got = await bytes_of(world, "agent-0", "d", rank)
        for page, copied in ((8, 4), (9, 5), (3, 2)):
            assert got[copied * size :][:size] == content[page * size :][:size]
        assert not any(got[6 * size :])
