"""Agents with pools on fake devices or in host memory, and a scheduler that is both sides, on the simulated network."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import HeapHost, MemoryHost, PagePool
from kvstore.protocol import MapPool, PagesPulled, PoolHandle
from kvstore.transfer.paired.link import LinkMaker
from kvstore.transfer.session import SessionLimits
from mesh.simulation import virtual_time
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import KVAgentConfig, PoolConfig
from nodes.registry.actor import RegistryActor
from tests.kvstore.fake_devices import FakeCards, FakeDeviceMemory
from tests.kvstore.fake_links import FakeLinks, FakeWire
from tests.nodes.kv_agent.one_by_one import outcome, together
from tests.nodes.kv_agent.two_schedulers import LAYOUT, NUM_PAGES, SIZE, Members, Scheduler, grant, ready, run_all_pages


class Process:
    """A process with its own view of the devices."""

    def __init__(self, tables: MemoryHost, cards: FakeCards) -> None:
        self.memory = FakeDeviceMemory(cards)
        self.host = CudaHost(tables, lambda: self.memory)

    def links(self, wire: FakeWire) -> dict[str, LinkMaker]:
        return {name: FakeLinks(wire, self.memory, name) for name in ("nccl", "tcp")}

    def bytes_of(self, pool: PagePool) -> memoryview:
        return pool.pages_view if pool.info.device == CPU else self.memory.view(pool.device_pages.pointer)


class World(Members):
    """A registry, one scheduler that is both sides, and agents; one set of devices, page tables in `tables`.

    `has_sockets`: agents have real engines of the transports between them, not fakes.
    """

    def __init__(
        self, tables: MemoryHost | None = None, scheduler: Scheduler | None = None, *, has_sockets: bool = False
    ) -> None:
        super().__init__()
        self.has_sockets = has_sockets
        self.tables = tables or HeapHost()
        self.cards = FakeCards(num_devices=2)
        self.wire = FakeWire()
        self.processes: dict[str, Process] = {}
        self.scheduler = scheduler or Scheduler()
        # The worker's process: it computes on the devices, so it sees the pages.
        self.worker = Process(self.tables, self.cards)

    async def agent(self, actor_id: str, settings: KVAgentConfig, epoch: int = 1) -> KVAgent:
        process = self.processes[actor_id] = Process(self.tables, self.cards)
        agent = KVAgent(settings, process.host, None if self.has_sockets else process.links(self.wire))
        await self.add(actor_id, agent, epoch)
        return agent

    async def start(self) -> None:
        await self.add("registry", RegistryActor())
        await self.add("S", self.scheduler)

    async def settle(self, num_members: int) -> None:
        while len(self.scheduler.ctx.members.all()) < num_members:
            await asyncio.sleep(0.05)

    async def ask(self, agent: str, message: Any) -> Any:
        return outcome((await self.scheduler.ctx.ask(agent, together(message), timeout_s=2.0)).message)

    async def pool(self, agent: str, group: str) -> tuple[PoolHandle, PagePool]:
        """Map a pool as its worker does; its scheduler, which sees the page table only, says that all pages run."""
        handle = await self.ask(agent, MapPool(group=group))
        run_all_pages(self.tables, handle)
        return handle, self.worker.host.open(handle.path, writable=True)

    async def pools(self, source_agent: str = "agent-1") -> tuple[PoolHandle, memoryview, memoryview]:
        """Map `p` at the agent that has it, and `d` at the first one; the bytes of both, those of `p` random."""
        source, from_pool = await self.pool(source_agent, "p")
        from_bytes = self.worker.bytes_of(from_pool)
        from_bytes[:] = random.Random(3).randbytes(len(from_bytes))
        return source, from_bytes, self.worker.bytes_of((await self.pool("agent-0", "d"))[1])

    async def two(self, near: KVAgentConfig, far: KVAgentConfig) -> tuple[PoolHandle, memoryview, memoryview]:
        """The agents agent-0 and agent-1, and their `pools`."""
        await self.agent("agent-0", near)
        await self.agent("agent-1", far)
        await self.settle(4)
        return await self.pools()

    async def order(
        self,
        source: PoolHandle,
        agent: str,
        source_pages: list[int],
        pages: list[int],
        *,
        timeout_s: float = 20.0,
        grant_id: str = "g",
    ) -> None:
        await self.ask(agent, grant(pages, grant_id, timeout_s=timeout_s, holder="S"))
        self.scheduler.announce(agent, ready(source, source_pages, total=len(pages), grant_id=grant_id))

    async def move_three(self, source: PoolHandle, from_bytes: memoryview, to_bytes: memoryview) -> None:
        """Pages 8, 9 and 3 of `p` get to 4, 5 and 2 of `d`, and nothing is written behind these."""
        await self.order(source, "agent-0", [8, 9, 3], [4, 5, 2])
        assert await self.scheduler.ends() == PagesPulled(grant_id="g", num_pages=3, complete=True)
        for page, copied in ((8, 4), (9, 5), (3, 2)):
            assert to_bytes[copied * SIZE :][:SIZE] == from_bytes[page * SIZE :][:SIZE]
        assert not any(to_bytes[6 * SIZE :])


def config(device: str, *groups: str, **changes: Any) -> KVAgentConfig:
    pools = [PoolConfig(group=group, num_pages=NUM_PAGES, layout=LAYOUT, device=device) for group in groups]
    fields: dict[str, Any] = {"pools": pools, "limits": SessionLimits(resend_s=0.5, map_s=1.0)}
    return KVAgentConfig(**(fields | changes))


def in_world(
    tables: MemoryHost | None = None, *, has_sockets: bool = False, scheduler: Scheduler | None = None
) -> Callable[..., None]:
    """Runs tests that are coroutine functions in a world that has started."""

    async def whole(test: Callable[[World], Awaitable[None]]) -> None:
        world = World(tables, scheduler, has_sockets=has_sockets)
        await world.start()
        await test(world)
        await world.stop()

    async def limited(test: Callable[[World], Awaitable[None]]) -> None:
        await asyncio.wait_for(whole(test), 60.0)

    if has_sockets:
        return lambda test: asyncio.run(limited(test))
    return lambda test: virtual_time.run(whole(test), limit_s=600.0)
