"""What workers that make pages are answered by the agent's actor, on the simulated network."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvstore.errors import PoolMissing
from kvstore.protocol import MakePages, OfferPages, PagesOffered
from mesh.errors import RemoteError
from mesh.simulation import virtual_time
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import PoolConfig
from nodes.protocol.memory import ReleaseMemory
from tests.nodes.kv_agent.agent_world import World, config
from tests.nodes.kv_agent.two_schedulers import LAYOUT, NUM_PAGES, Scheduler


class Maker(Scheduler):
    role = "worker"


def run(main: Callable[[World, KVAgent, Maker], Awaitable[None]]) -> None:
    async def whole() -> None:
        world, maker = World(), Maker()
        await world.start()
        pools = [
            PoolConfig(group="p", num_pages=NUM_PAGES, layout=LAYOUT, device="cuda:0", in_worker=True),
            PoolConfig(group="d", num_pages=NUM_PAGES, layout=LAYOUT, device="cuda:0"),
        ]
        agent = await world.agent("agent-0", config("cuda:0", pools=pools))
        await world.add("maker-0", maker)
        await world.settle(4)
        await main(world, agent, maker)
        await world.stop()

    virtual_time.run(whole(), limit_s=600.0)


async def refusal(actor: Scheduler, message: Any) -> tuple[str, bool]:
    with pytest.raises(RemoteError) as caught:
        await actor.ctx.ask("agent-0", message, timeout_s=2.0)
    return caught.value.code, caught.value.retryable


async def table(actor: Scheduler) -> Any:
    return (await actor.ctx.ask("agent-0", MakePages(group="p"), timeout_s=2.0)).message


def test_only_pages_of_workers_are_made_by_workers() -> None:
    async def main(world: World, agent: KVAgent, maker: Maker) -> None:
        for group in ("d", "nowhere"):
            assert await refusal(maker, MakePages(group=group)) == ("unknown_group", False)

    run(main)


def test_an_offer_counts_once_and_for_the_present_table_only() -> None:
    async def main(world: World, agent: KVAgent, maker: Maker) -> None:
        handle = await table(maker)
        pages = world.worker.host.make_pages(world.worker.host.open(handle.path, writable=True))
        offer = OfferPages(group="p", incarnation=handle.incarnation, ipc_handle=pages)
        stale = OfferPages(group="p", incarnation=handle.incarnation - 1, ipc_handle=pages)
        assert await refusal(maker, stale) == ("superseded", True)
        for _ in range(2):
            answer = (await maker.ctx.ask("agent-0", offer, timeout_s=2.0)).message
            assert answer == PagesOffered(group="p", incarnation=handle.incarnation)

    run(main)


def test_nothing_is_made_while_the_memory_is_released() -> None:
    async def main(world: World, agent: KVAgent, maker: Maker) -> None:
        await world.ask("agent-0", ReleaseMemory(groups=["p"], reload_weights=True))
        assert await refusal(maker, MakePages(group="p")) == ("memory_released", True)

    run(main)


def test_an_agent_that_cannot_make_a_table_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: World, agent: KVAgent, maker: Maker) -> None:
        ended: list[str] = []
        monkeypatch.setattr(type(agent.ctx), "end", lambda _, reason: ended.append(reason))

        def fail(*_: Any) -> None:
            raise PoolMissing("the file system is gone")

        monkeypatch.setattr(world.processes["agent-0"].host, "create", fail)
        asking = asyncio.ensure_future(table(maker))
        while not ended:
            await asyncio.sleep(0.01)
        assert ended == ["the page table of p cannot be made: the file system is gone"]
        asking.cancel()
        monkeypatch.undo()

    run(main)
