"""Control messages, bytes and CPU against the number of hosts, by simulation of the real actors on one core.

Each host has a supervisor, a kv_agent, a scheduler and a worker with `echo`; the head has the registry, and a gateway,
a tokenizer and a detokenizer for every ten hosts. All of their code runs, on virtual time and over a network that loses
nothing; sockets and the kernel are not measured. Figures are for the busiest actor of each role: while all join at
once, while nothing happens, around the death of a worker, around a new host, and while the registry returns. Half of
the groups prefill.
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from cli.supervisor.actor import SupervisorActor
from kvstore.pool.page_pool import HeapHost
from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.membership.view import READY
from mesh.options import SystemOptions
from mesh.simulation.network import SimulatedNetwork, SimulatedTransport
from mesh.simulation.virtual_time import run
from mesh.system import ActorSystem
from mesh.testing.processes import SimulatedProcess
from mesh.transport.base import Buffer, Channel, Link, Listener
from nodes.detokenizer.actor import DetokenizerActor
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.config import GatewayConfig
from nodes.gateway.local import LocalGateway
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import KVAgentConfig, PoolConfig
from nodes.model_spec import resolve_model
from nodes.registry.actor import RegistryActor
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.config import SchedulerConfig
from nodes.tokenizer.actor import TokenizerActor
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.actor import WorkerActor
from nodes.worker.config import WorkerConfig

CONTEXT_LENGTH = 512
HOSTS_PER_GATEWAY = 10
ROLES = ("registry", "supervisor", "scheduler", "worker", "kv-agent", "gateway", "tokenizer")
SETTLED_S = 5.0
IDLE_S = 10.0


@dataclass
class Meter:
    """What one actor has done: messages, bytes in both directions, and CPU seconds."""

    num_sent: int = 0
    num_taken: int = 0
    num_bytes: int = 0
    cpu_s: float = 0.0

    def less(self, other: "Meter") -> "Meter":
        """What was added since `other`."""
        return Meter(*(mine - its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def copy(self) -> "Meter":
        """A copy as of now."""
        return Meter(**vars(self))


class MeteredProcess(SimulatedProcess):
    """A process that counts its CPU time."""

    meter: Meter

    def step(self, callback: Callable[..., object], *args: Any) -> None:
        """One callback."""
        # CPU time of this thread: the machine's other work is not the actors'.
        began = time.thread_time()
        super().step(callback, *args)
        self.meter.cpu_s += time.thread_time() - began


class MeteredTransport:
    """A transport that counts messages, and hands on arriving ones within its actor's process."""

    def __init__(self, inner: SimulatedTransport, process: MeteredProcess) -> None:
        self._inner = inner
        self._process = process
        self._meter = process.meter
        self._listener: Listener | None = None

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        """Bind."""
        self._listener = listener
        return await self._inner.start(address, self)

    def on_frames(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> None:
        """Count a message and hand it on."""
        assert self._listener is not None
        self._meter.num_taken += 1
        self._meter.num_bytes += sum(map(len, parts))
        self._process.enter(self._listener.on_frames, link, channel, parts)

    def on_link_down(self, link: Link, reason: str) -> None:
        """Hand it on."""
        assert self._listener is not None
        self._process.enter(self._listener.on_link_down, link, reason)

    def on_some_link_down(self) -> None:
        """Hand it on."""
        assert self._listener is not None
        self._process.enter(self._listener.on_some_link_down)

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        """Connect."""
        return self._inner.dial(peer, endpoint)

    def send(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> bool:
        """Count a message and send it."""
        self._meter.num_sent += 1
        self._meter.num_bytes += sum(map(len, parts))
        return self._inner.send(link, channel, parts)

    def close_link(self, link: Link) -> None:
        """Disconnect."""
        self._inner.close_link(link)

    async def stop(self) -> None:
        """Let go."""
        await self._inner.stop()


class Keeper:
    """Stands in for the keeper of a supervisor's processes; here it does nothing."""

    def beat(self, peer: Address, state: str, progress: str) -> None:
        """An actor lives."""


@dataclass
class ScaleMesh:
    """All actors of one mesh of `num_hosts`."""

    num_hosts: int
    network: SimulatedNetwork = field(default_factory=lambda: SimulatedNetwork(0, outbox_limit=1 << 20, trace_limit=1))
    found: tuple[Address, Endpoint] | None = None
    makers: dict[str, Callable[[], Actor]] = field(default_factory=dict[str, Callable[[], Actor]])
    meters: dict[str, Meter] = field(default_factory=lambda: defaultdict(Meter))
    processes: dict[str, MeteredProcess] = field(default_factory=dict[str, MeteredProcess])
    replaced: list[MeteredProcess] = field(default_factory=list[MeteredProcess])
    systems: dict[str, ActorSystem] = field(default_factory=dict[str, ActorSystem])
    actors: dict[str, Any] = field(default_factory=dict[str, Any])
    starting: list["asyncio.Task[None]"] = field(default_factory=list["asyncio.Task[None]"])

    def __post_init__(self) -> None:
        self.spec = resolve_model("echo")
        self.makers["registry"] = RegistryActor
        self.makers["supervisor.head"] = lambda: SupervisorActor(Keeper(), 1)  # pyright: ignore[reportArgumentType]
        gateway = GatewayConfig(model_name="echo", model="echo", context_length=CONTEXT_LENGTH)
        tokenizer = TokenizerConfig(model="echo", context_length=CONTEXT_LENGTH, use_threads=False, use_processes=False)
        detokenizer = DetokenizerConfig(model="echo", use_threads=False)
        for number in range(max(1, self.num_hosts // HOSTS_PER_GATEWAY)):
            self.makers[f"gateway-{number}.head"] = lambda: LocalGateway(gateway)
            self.makers[f"tokenizer-{number}.head"] = lambda: TokenizerActor(tokenizer)
            self.makers[f"detokenizer-{number}.head"] = lambda: DetokenizerActor(detokenizer)
        for number in range(self.num_hosts):
            self.makers |= self.host(number)

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """Where the registry is."""
        return self.found

    def host(self, number: int) -> dict[str, Callable[[], Actor]]:
        """The actors of one more host."""
        host, phase = f"h{number}", "prefill" if number % 2 else "decode"
        group, agent, memory = f"{phase}-0.{host}", f"kv-agent-0.{host}", HeapHost()
        pool = PoolConfig(group=group, num_pages=64, layout=self.spec.kv_layout("float32", 16, 0, 1))
        scheduler = SchedulerConfig(
            group=group,
            phase=phase,
            worker=f"worker-{group}",
            agent=agent,
            context_length=CONTEXT_LENGTH,
            eos_token_ids=self.spec.eos_token_ids,
        )
        worker = WorkerConfig(group=group, model="echo", agent=agent)
        return {
            f"supervisor.{host}": lambda: SupervisorActor(Keeper(), 1),  # pyright: ignore[reportArgumentType]
            agent: lambda: KVAgent(KVAgentConfig(pools=[pool]), memory),
            f"scheduler-{group}": lambda: SchedulerActor(scheduler, memory),
            f"worker-{group}": lambda: WorkerActor(worker, memory),
        }

    async def start(self, actor_id: str, epoch: int = 1) -> None:
        """Start one actor; it joins by itself."""
        actor, address = self.makers[actor_id](), Address(actor_id, epoch)
        host = "head" if actor_id == "registry" else actor_id.rpartition(".")[2]
        supervisor = None
        if not actor_id.startswith(("supervisor", "registry")):
            by = Address(f"supervisor.{host}", 1)
            supervisor = by, Endpoint(control=f"sim://{by}/c", data=f"sim://{by}/d")
        if actor_id in self.processes:
            self.replaced.append(self.processes[actor_id])
        process = self.processes[actor_id] = MeteredProcess(address, self.network, lambda _: None)
        process.meter = self.meters[actor_id]
        transport = MeteredTransport(self.network.transport(address), process)
        options = SystemOptions(host=host, pid=1, supervisor=supervisor)

        async def make() -> ActorSystem:
            return ActorSystem(actor, address, transport, self, options)

        system = self.systems[actor_id] = await process.spawn(make())
        self.actors[actor_id] = actor
        task = process.spawn(system.start())
        self.starting.append(task)
        if actor_id == "registry":
            await task
            self.found = address, system.describe().endpoint

    async def start_all(self, actor_ids: Sequence[str]) -> float:
        """Start all at once; returns the seconds until every actor knows that all are ready."""
        began = asyncio.get_running_loop().time()
        for actor_id in actor_ids:
            await self.start(actor_id)
        await self.settle()
        return asyncio.get_running_loop().time() - began

    async def settle(self) -> None:
        """Wait until `is_settled`."""
        while not self.is_settled():  # noqa: ASYNC110 - virtual time, and there is no event to wait for
            await asyncio.sleep(0.05)

    def is_settled(self) -> bool:
        """Whether all are members, ready, and know the registry's latest version."""
        core = self.actors["registry"].core
        members = core.members()
        views = [one.registration.view for name, one in self.systems.items() if name != "registry"]
        return (
            len(members) == len(self.systems)
            and all(member.state == READY for member in members)
            and all((view.registry_epoch, view.version) == (core.epoch, core.version) for view in views)
        )

    def snapshot(self) -> dict[str, Meter]:
        """All meters as they are."""
        return {actor_id: meter.copy() for actor_id, meter in self.meters.items()}

    def busiest(self, before: dict[str, Meter]) -> dict[str, Meter]:
        """By role: the largest figures of any of its actors since `before`."""
        most: dict[str, Meter] = {}
        for actor_id, meter in self.meters.items():
            role = next((role for role in ROLES if actor_id.startswith(role)), "")
            since = meter.less(before.get(actor_id, Meter()))
            known = vars(most.setdefault(role, Meter()))
            most[role] = Meter(
                *(max(one, other) for one, other in zip(known.values(), vars(since).values(), strict=True))
            )
        return most

    async def tell_death(self) -> None:
        """Kill a worker; its supervisor tells the others, and the next one is started."""
        name = "worker-decode-0.h0"
        self.processes[name].kill()
        await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        self.processes["supervisor.h0"].enter(self.actors["supervisor.h0"].tell_dead, Address(name, 1), "killed")
        views = [one.registration.view for actor_id, one in self.systems.items() if actor_id not in (name, "registry")]
        while any(view.get(name) for view in views):  # noqa: ASYNC110 - as `settle`
            await asyncio.sleep(0.001)
        print(f"# death: known everywhere after {asyncio.get_running_loop().time() - began:.3f} s", flush=True)
        await asyncio.sleep(0.25)
        await self.start(name, 2)

    async def return_registry(self) -> None:
        """Kill the registry, and start the next one at once."""
        self.processes["registry"].kill()
        await asyncio.sleep(0.1)
        await self.start("registry", 2)


def show(phase: str, num_hosts: int, most: dict[str, Meter], per_s: float) -> None:
    """One row for each role."""
    for role in ROLES:
        one = most[role]
        figures = [f"{value / per_s:>12,.1f}" for value in (one.num_sent, one.num_taken, one.num_bytes / 1000)]
        print(f"{phase:<10}{num_hosts:>6} {role:<12}{''.join(figures)}{one.cpu_s / per_s * 1000:>12,.2f}", flush=True)


async def measure(num_hosts: int) -> None:
    """All phases of one size."""
    mesh = ScaleMesh(num_hosts)
    before = mesh.snapshot()
    settled_s = await mesh.start_all(list(mesh.makers))
    print(f"# {num_hosts} hosts, {len(mesh.systems)} actors: all know each other after {settled_s:.1f} s", flush=True)
    show("join", num_hosts, mesh.busiest(before), 1.0)
    await asyncio.sleep(SETTLED_S)
    before = mesh.snapshot()
    await asyncio.sleep(IDLE_S)
    idle = mesh.busiest(before)
    show("idle/s", num_hosts, idle, IDLE_S)

    async def around(phase: str, what: Any) -> None:
        before = mesh.snapshot()
        began = asyncio.get_running_loop().time()
        await what
        await mesh.settle()
        print(f"# {phase}: settled after {asyncio.get_running_loop().time() - began:.1f} s", flush=True)
        show(phase, num_hosts, mesh.busiest(before), 1.0)
        await asyncio.sleep(SETTLED_S)

    await around("death", mesh.tell_death())
    mesh.makers |= (more := mesh.host(num_hosts))
    await around("new host", mesh.start_all(list(more)))
    await around("registry", mesh.return_registry())
    # Also those that were replaced: tasks of a dead process are not cancelled, and the loop would wait for them through
    # a whole day of heartbeats.
    for process in (*mesh.processes.values(), *mesh.replaced):
        process.bury()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 30, 100, 300])
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    print(f"{'phase':<10}{'hosts':>6} {'role':<12}{'sent':>12}{'taken':>12}{'kB':>12}{'CPU ms':>12}")
    for num_hosts in args.hosts:
        began = time.perf_counter()
        run(measure(num_hosts), inline_executor=True)
        print(f"# {time.perf_counter() - began:.0f} s on this machine", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
