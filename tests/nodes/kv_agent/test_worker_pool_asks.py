"""What workers that make pages are answered by the agent's actor, on the simulated network."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from kvstore.errors import PoolMissing
from kvstore.protocol import MakePages, OfferPages, PagesOffered
from mesh.errors import RemoteError
from nodes.kv_agent.config import PoolConfig
from nodes.protocol.memory import ReleaseMemory
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.agent_world import World, config, in_world
from tests.nodes.kv_agent.two_schedulers import LAYOUT, NUM_PAGES, Scheduler


class Maker(Scheduler):
    role = "worker"


@pytest.fixture
def world() -> Callable[..., None]:
    """An agent, whose pool `p` a worker makes; that one is the scheduler."""
    pools = [
        PoolConfig(group="p", num_pages=NUM_PAGES, layout=LAYOUT, device="cuda:0", in_worker=True),
        PoolConfig(group="d", num_pages=NUM_PAGES, layout=LAYOUT, device="cuda:0"),
    ]

    async def opened(test: Callable[[World], Awaitable[None]], world: World) -> None:
        await world.agent("agent-0", config("cuda:0", pools=pools))
        await world.settle(3)
        await test(world)

    return lambda test: in_world(scheduler=Maker())(partial(opened, test))


async def refusal(actor: Scheduler, message: Any) -> tuple[str, bool]:
    with pytest.raises(RemoteError) as caught:
        await actor.ctx.ask("agent-0", message, timeout_s=2.0)
    return caught.value.code, caught.value.retryable


async def table(actor: Scheduler) -> Any:
    return (await actor.ctx.ask("agent-0", MakePages(group="p"), timeout_s=2.0)).message


async def test_only_pages_of_workers_are_made_by_workers(world: World) -> None:
    for group in ("d", "nowhere"):
        assert await refusal(world.scheduler, MakePages(group=group)) == ("unknown_group", False)


async def test_an_offer_counts_once_and_for_the_present_table_only(world: World) -> None:
    handle = await table(world.scheduler)
    pages = world.worker.host.make_pages(world.worker.host.open(handle.path, writable=True))
    offer = OfferPages(group="p", incarnation=handle.incarnation, ipc_handle=pages)
    stale = OfferPages(group="p", incarnation=handle.incarnation - 1, ipc_handle=pages)
    assert await refusal(world.scheduler, stale) == ("superseded", True)
    for _ in range(2):
        answer = (await world.scheduler.ctx.ask("agent-0", offer, timeout_s=2.0)).message
        assert answer == PagesOffered(group="p", incarnation=handle.incarnation)


async def test_nothing_is_made_while_the_memory_is_released(world: World) -> None:
    await world.ask("agent-0", ReleaseMemory(groups=["p"], reload_weights=True))
    assert await refusal(world.scheduler, MakePages(group="p")) == ("memory_released", True)


async def test_an_agent_that_cannot_make_a_table_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(type(world.actors["agent-0"].ctx), "end", lambda _, reason: ended.append(reason))

    def fail(*_: Any) -> None:
        raise PoolMissing("the file system is gone")

    monkeypatch.setattr(world.processes["agent-0"].host, "create", fail)
    asking = asyncio.ensure_future(table(world.scheduler))
    await until(lambda: ended)
    assert ended == ["the page table of p cannot be made: the file system is gone"]
    asking.cancel()
    monkeypatch.undo()
