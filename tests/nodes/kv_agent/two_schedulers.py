"""Agents among other actors on the simulated network: a registry, two schedulers, messages about three pages."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.layout import KVLayout
from kvstore.pool.page_pool import HeapHost, MemoryHost, PagePool
from kvstore.protocol import (
    GrantClosed,
    MapPool,
    OpenGrant,
    PagesPulled,
    PagesReady,
    PoolHandle,
    StoreChanged,
    TransferFailed,
)
from kvstore.transfer.session import SessionLimits
from mesh.actor import Actor, Call
from mesh.address import Address, Endpoint
from mesh.membership.view import Member
from mesh.options import SystemOptions
from mesh.simulation import virtual_time
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import KVAgentConfig, PoolConfig
from nodes.protocol import HasLetGo, LetGo, MemoryList, ReleaseMemory, ResumeMemory
from nodes.registry.actor import RegistryActor
from nodes.roles import NODE_CODEC
from tests.nodes.kv_agent.one_by_one import grant_of, news, outcome, ready_of, together

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4)
SIZE = LAYOUT.page_bytes
NUM_PAGES = 12


class Bootstrap:
    found: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        return self.found


class Scheduler(Actor):
    """Keeps what it is told; maps pools and writes their page tables as a scheduler does."""

    role = "scheduler"
    codec = NODE_CODEC

    def __init__(self) -> None:
        self.heard: list[PagesPulled | TransferFailed] = []
        self.news = asyncio.Event()
        self.changed: list[str] = []

    def on_tell(self, sender: Address, message: Any, buffers: Any) -> None:
        if isinstance(message, StoreChanged):
            self.changed.append(message.group)
            return
        self.heard.extend(news(message))
        self.news.set()

    async def until(self, is_there: Callable[[PagesPulled | TransferFailed], bool]) -> PagesPulled | TransferFailed:
        async with asyncio.timeout(30):
            while True:
                for message in self.heard:
                    if is_there(message):
                        return message
                self.news.clear()
                await self.news.wait()

    def announce(self, agent: str, ready: PagesReady) -> None:
        self.ctx.tell(agent, together(ready))

    async def ends(self) -> PagesPulled | TransferFailed:
        return await self.until(lambda message: isinstance(message, TransferFailed) or message.complete)

    async def fails(self, words: str = "") -> str:
        """The code that the first end has, which is a failure that says these words."""
        end = await self.ends()
        assert words in end.message
        return end.code


class Holder(Scheduler):
    """Lets go when it is told to, once `is_willing`, as whatever has mapped a pool must."""

    is_willing = True

    def on_ask(self, call: Call) -> None:
        order: Any = call.message
        if not isinstance(order, LetGo) or not self.is_willing:
            call.fail("not_ready", "not now", retryable=True)
            return
        call.reply(HasLetGo(group=order.group, number=order.number))


class SlowAgent(KVAgent):
    """Copies one quantum each millisecond: on virtual time a copy would otherwise be over within its instant."""

    def _keep_pumping(self) -> None:
        if self._pumping is None and self.pulls.is_busy:
            self._pumping = self.ctx.later(0.001, self._pump)


class Nonsense(Actor):
    """Answers every ask with what was not asked for."""

    role = "kv_agent"
    codec = NODE_CODEC

    def on_ask(self, call: Call) -> None:
        call.reply(GrantClosed(grant_id="?"))


class Members:
    """Actors on one simulated network, by their names."""

    def __init__(self) -> None:
        self.network = SimulatedNetwork(1)
        self.bootstrap = Bootstrap()
        self.systems: dict[str, ActorSystem] = {}
        self.actors: dict[str, Actor] = {}

    async def add(self, actor_id: str, actor: Actor, epoch: int = 1) -> ActorSystem:
        address = Address(actor_id, epoch)
        # Seeded by name: who else is there does not move what an actor draws.
        options = SystemOptions(random=random.Random(actor_id))
        system = ActorSystem(actor, address, self.network.transport(address), self.bootstrap, options)
        await system.start()
        self.systems[actor_id] = system
        self.actors[actor_id] = actor
        if actor_id == "registry":
            self.bootstrap.found = (address, system.describe().endpoint)
        return system

    async def sees(self, actor_id: str, member: str, epoch: int = 1) -> Member:
        members = self.actors[actor_id].ctx.members
        while (found := members.get(member)) is None or found.epoch < epoch:
            await asyncio.sleep(0.05)
        return found

    async def stop(self) -> None:
        for system in reversed(self.systems.values()):
            await system.stop()


class World(Members):
    """A registry, two schedulers D and P, and as many agents as wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.host: MemoryHost = HeapHost()
        self.d, self.p = Scheduler(), Scheduler()

    async def agents(self, *settings: KVAgentConfig, kind: type[KVAgent] = KVAgent) -> list[KVAgent]:
        """agent-0 and so on, with everybody else."""
        agents = [kind(one, self.host) for one in settings]
        await self.start(*agents)
        return agents

    async def start(self, *agents: KVAgent) -> None:
        await self.add("registry", RegistryActor())
        await self.add("D", self.d)
        await self.add("P", self.p)
        for number, agent in enumerate(agents):
            await self.add(f"agent-{number}", agent)
        while len(self.d.ctx.members.all()) < 3 + len(agents) - 1:
            await asyncio.sleep(0.05)

    async def ask(self, scheduler: Scheduler, agent: str, message: Any) -> Any:
        return outcome((await scheduler.ctx.ask(agent, together(message), timeout_s=2.0)).message)

    async def pool(self, scheduler: Scheduler, agent: str, group: str) -> tuple[PoolHandle, PagePool]:
        """Map a pool as its scheduler does, and say that all its pages are running ones of generation 7."""
        handle = await self.ask(scheduler, agent, MapPool(group=group))
        return handle, run_all_pages(self.host, handle)

    async def pools(self, source_agent: str = "agent-0") -> tuple[PoolHandle, PagePool, PagePool]:
        """Map `p` at the agent that has it, and `d` at the first one."""
        source, from_pool = await self.pool(self.p, source_agent, "p")
        return source, from_pool, (await self.pool(self.d, "agent-0", "d"))[1]

    async def order(self, source: PoolHandle, source_pages: list[int], pages: list[int]) -> None:
        await self.ask(self.d, "agent-0", grant(pages))
        self.p.announce("agent-0", ready(source, source_pages))


def maps_others(agent: KVAgent) -> bool:
    """Whether another agent's pool is mapped. By a private name: figures count only what the agent knows of."""
    return bool(agent.transports.transports[0]._peers)


def run_all_pages(host: MemoryHost, handle: PoolHandle) -> PagePool:
    """The pool with a page table that says what `grant` and `ready` say: all pages are running ones of generation 7."""
    pool = host.open(handle.path, writable=True)
    for page in range(1, pool.num_pages):
        pool.table().write(page, PageEntry(PageState.RUNNING, generation=7))
    return pool


def config(*groups: str, **changes: Any) -> KVAgentConfig:
    pools = [PoolConfig(group=group, num_pages=NUM_PAGES, layout=LAYOUT) for group in groups]
    fields: dict[str, Any] = {"pools": pools, "limits": SessionLimits(resend_s=0.5, map_s=1.0), "quantum_bytes": SIZE}
    return KVAgentConfig(**(fields | changes))


def ranks_of(group: str, tp_size: int, device: str = "cpu") -> list[PoolConfig]:
    """The pools of a group's ranks, each with its share of the heads; on devices, each on one of its own."""
    heads = LAYOUT.num_kv_heads // tp_size
    layouts = [
        msgspec.structs.replace(LAYOUT, num_kv_heads=heads, tp_rank=one, tp_size=tp_size) for one in range(tp_size)
    ]
    names = [device if device == "cpu" else f"{device}:{rank}" for rank in range(tp_size)]
    pairs = zip(layouts, names, strict=True)
    return [PoolConfig(group=group, num_pages=NUM_PAGES, layout=layout, device=name) for layout, name in pairs]


async def becomes(
    ask: Callable[[Any], Awaitable[Any]], desired: ReleaseMemory | ResumeMemory, state: str
) -> MemoryList:
    """Ask an agent until all groups are in this state."""
    for _ in range(200):
        found = await ask(desired)
        if all(one.state == state for one in found.groups):
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(found)


def grant(pages: list[int], grant_id: str = "g", **fields: Any) -> OpenGrant:
    return grant_of(pages, **{"layout_digest": LAYOUT.digest, "grant_id": grant_id, **fields})


def ready(source: PoolHandle, pages: list[int], **fields: Any) -> PagesReady:
    place = {"source_group": source.group, "source_agent": source.agent, "source_incarnation": source.incarnation}
    return ready_of(pages, **{"layout_digest": LAYOUT.digest, **place, **fields})


def run(main: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        world = World()
        await main(world)
        await world.stop()

    virtual_time.run(whole(), limit_s=600.0)
