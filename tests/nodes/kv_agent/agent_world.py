"""Agents with pools on fake devices or in host memory, and a scheduler that is both sides, on the simulated network."""

import asyncio
import random
from typing import Any

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.layout import KVLayout
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import HeapHost, MemoryHost, PagePool
from kvstore.protocol import MapPool, OpenGrant, PagesPulled, PagesReady, PoolHandle, TransferFailed
from kvstore.transfer.paired.link import LinkMaker
from kvstore.transfer.session import SessionLimits
from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.options import SystemOptions
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import KVAgentConfig, PoolConfig
from nodes.registry.actor import RegistryActor
from nodes.roles import NODE_CODEC
from tests.kvstore.fake_devices import FakeCards, FakeDeviceMemory
from tests.kvstore.fake_links import FakeLinks, FakeWire
from tests.nodes.kv_agent.one_by_one import news, outcome, together

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4)
SIZE = LAYOUT.page_bytes
NUM_PAGES = 12


class Bootstrap:
    found: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        return self.found


class Scheduler(Actor):
    role = "scheduler"
    codec = NODE_CODEC

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_tell(self, sender: Address, message: Any, buffers: Any) -> None:
        self.heard.extend(news(message))

    async def ends(self) -> PagesPulled | TransferFailed:
        async with asyncio.timeout(30):
            while True:
                for message in self.heard:
                    if isinstance(message, TransferFailed) or message.complete:
                        return message
                await asyncio.sleep(0.01)


class Process:
    """A process with its own view of the devices."""

    def __init__(self, tables: MemoryHost, cards: FakeCards) -> None:
        self.memory = FakeDeviceMemory(cards)
        self.host = CudaHost(tables, lambda: self.memory)

    def links(self, wire: FakeWire) -> dict[str, LinkMaker]:
        return {name: FakeLinks(wire, self.memory, name) for name in ("nccl", "tcp")}

    def bytes_of(self, pool: PagePool) -> memoryview:
        return pool.pages_view if pool.info.device == CPU else self.memory.view(pool.device_pages.pointer)


class World:
    """A registry, one scheduler that is both sides, and agents; one set of devices, page tables in `tables`.

    `has_sockets`: agents have real engines of the transports between them, not fakes.
    """

    def __init__(self, tables: MemoryHost | None = None, *, has_sockets: bool = False) -> None:
        self.has_sockets = has_sockets
        self.network = SimulatedNetwork(1)
        self.bootstrap = Bootstrap()
        self.tables = tables or HeapHost()
        self.cards = FakeCards(num_devices=2)
        self.wire = FakeWire()
        self.systems: dict[str, ActorSystem] = {}
        self.processes: dict[str, Process] = {}
        self.scheduler = Scheduler()
        # The worker's process: it computes on the devices, so it sees the pages.
        self.worker = Process(self.tables, self.cards)

    async def add(self, actor_id: str, actor: Actor, epoch: int = 1) -> None:
        address = Address(actor_id, epoch)
        options = SystemOptions(random=random.Random(actor_id))
        system = ActorSystem(actor, address, self.network.transport(address), self.bootstrap, options)
        await system.start()
        self.systems[actor_id] = system
        if actor_id == "registry":
            self.bootstrap.found = (address, system.describe().endpoint)

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

    async def stop(self) -> None:
        for system in reversed(self.systems.values()):
            await system.stop()

    async def ask(self, agent: str, message: Any) -> Any:
        return outcome((await self.scheduler.ctx.ask(agent, together(message), timeout_s=2.0)).message)

    async def pool(self, agent: str, group: str) -> tuple[PoolHandle, PagePool]:
        """Map a pool as its worker does; its scheduler, which sees the page table only, says that all pages run."""
        handle = await self.ask(agent, MapPool(group=group))
        scheduler = self.tables.open(handle.path, writable=True)
        for page in range(1, scheduler.num_pages):
            scheduler.table().write(page, PageEntry(PageState.RUNNING, generation=7))
        return handle, self.worker.host.open(handle.path, writable=True)

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
        await self.ask(
            agent,
            OpenGrant(
                grant_id=grant_id,
                group="d",
                pages=pages,
                generations=[7] * len(pages),
                layout_digest=LAYOUT.digest,
                holder="S",
                holder_epoch=1,
                timeout_s=timeout_s,
            ),
        )
        announced = PagesReady(
            grant_id=grant_id,
            first=0,
            total=len(pages),
            source_group=source.group,
            source_agent=source.agent,
            source_incarnation=source.incarnation,
            layout_digest=LAYOUT.digest,
            pages=source_pages,
            generations=[7] * len(source_pages),
        )
        self.scheduler.ctx.tell(agent, together(announced))


def config(device: str, *groups: str, **changes: Any) -> KVAgentConfig:
    pools = [PoolConfig(group=group, num_pages=NUM_PAGES, layout=LAYOUT, device=device) for group in groups]
    fields: dict[str, Any] = {"pools": pools, "limits": SessionLimits(resend_s=0.5, map_s=1.0)}
    return KVAgentConfig(**(fields | changes))
