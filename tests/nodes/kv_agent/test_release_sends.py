"""An agent gives memory back that it sends to other agents: what is being read stays, nothing more is begun."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from kvstore.protocol import MapPool, OfferPair, PagesPulled, PoolHandle
from mesh.address import Address
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.protocol.memory import ReleaseMemory, ResumeMemory
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent import two_schedulers
from tests.nodes.kv_agent.agent_world import World, config, in_world
from tests.nodes.kv_agent.two_schedulers import LAYOUT, NUM_PAGES, SIZE, Holder


@pytest.fixture
def world() -> Callable[..., None]:
    return in_world(scheduler=Holder())


async def two(world: World) -> tuple[KVAgent, PoolHandle]:
    """An agent with `d`, and one with `p`; returns the latter and its pool, all of whose pages run."""
    configs = config("cuda:0", "d", device_transport="nccl"), config("cuda:1", "p", device_transport="nccl")
    source, _, _ = await world.two(*configs)
    return world.actors["agent-1"], source


async def becomes(world: World, desired: ReleaseMemory | ResumeMemory, state: str) -> None:
    await two_schedulers.becomes(partial(world.ask, "agent-1"), desired, state)


async def test_pages_that_are_being_sent_stay_until_nothing_reads_them(world: World) -> None:
    far, source = await two(world)
    # The sender's kernel goes on after its pair was given up.
    world.wire.is_slow = world.wire.is_stuck = True
    await world.order(source, "agent-0", [8], [4])
    await until(lambda: far.transports.is_sending("p"))
    world.network.crash(Address("agent-0", 1))
    for _ in range(100):
        (found,) = (await world.ask("agent-1", ReleaseMemory())).groups
        await asyncio.sleep(0.1)
    assert (found.state, found.waiting_for, found.pool_bytes) == ("releasing", [], NUM_PAGES * SIZE)
    (sender,) = (link for link in world.wire.links if link.memory is world.processes["agent-1"].memory)
    sender.stop()
    await becomes(world, ReleaseMemory(), "released")
    assert not far.transports.is_sending("p")


async def test_nothing_is_sent_of_a_pool_that_is_being_released_and_offered_again_it_is(world: World) -> None:
    _, source = await two(world)
    world.scheduler.is_willing = False
    await becomes(world, ReleaseMemory(), "releasing")
    offer = OfferPair(
        pair="x", unique_id=bytes(128), group="p", incarnation=source.incarnation, layout_digest=LAYOUT.digest,
        timeout_s=5.0, transport="nccl",
    )  # fmt: skip
    with pytest.raises(RemoteError, match="unknown_group"):
        await world.ask("agent-1", offer)
    await becomes(world, ResumeMemory(), "held")
    assert (await world.ask("agent-1", MapPool(group="p"))).incarnation == source.incarnation
    await world.order(source, "agent-0", [8], [4])
    assert await world.scheduler.ends() == PagesPulled(grant_id="g", num_pages=1, complete=True)
