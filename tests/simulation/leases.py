"""A host whose supervisor renews its actors' leases, and what befalls them: hangs, deaths, losses. One seeded run.

    python -m tests.simulation leases SEED

Actors do nothing but be members, so a seed is a minute of virtual time in some hundredths of a second. `by-hand` has no
supervisor and renews its lease by itself, as peers in other languages do.
"""

import asyncio
import random
from collections import Counter
from typing import Any

import structlog

from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.membership.view import SUPERVISOR, Member
from mesh.options import SystemOptions
from mesh.simulation.faults import Faults
from mesh.simulation.network import SimulatedNetwork
from mesh.simulation.virtual_time import run
from mesh.system import ActorSystem
from mesh.testing.processes import ProcessState, SimulatedProcess
from mesh.wire.codec import Codec
from mesh.wire.frames import Ping
from nodes.registry.actor import RegistryActor
from tests.simulation.deaths import MortalTransport
from tests.simulation.scenario import SILENT

SUPERVISED = ("a", "b", "c")
BY_HAND = "by-hand"
LEASE_S = 5.0
GONE_S = LEASE_S + 0.5
"""Half a second for what is on its way: when a lease ends, it is looked at at once."""
BACK_S = 4.0
"""Two dials of 2 s: one that came too early, and one that finds who has come back."""
STEP_S = 0.25
LOOKS_S = 60.0
FAULTS = Faults(drop=0.02, slow=0.05, duplicate=0.02)


class Nobody(Actor):
    """Counts who left its view without having died or hung."""

    role = "nobody"
    codec = Codec(Ping)

    def __init__(self, mesh: "LeasedMesh") -> None:
        self._mesh = mesh

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        self._mesh.note_left(self.ctx.address, left)


class Watcher(Nobody):
    """The supervisor of the host, which says that an actor is dead, and kills nobody."""

    role = SUPERVISOR


class LeasedMesh:
    """The actors of one host by id; `problems` is what must not be."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.network = SimulatedNetwork(seed, FAULTS)
        self.draw = random.Random(f"leases/{seed}")
        self.processes: dict[str, SimulatedProcess] = {}
        self.all_processes: list[SimulatedProcess] = []
        self.systems: dict[str, ActorSystem] = {}
        self.epochs: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.hung_since: dict[str, float] = {}
        self.well_since: dict[str, float] = {}
        self.registry_since = 0.0

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """Where the registry is, also while nobody listens there any more."""
        registry = self.systems.get("registry")
        return (registry.address, _endpoint(registry.address)) if registry is not None else None

    def note_left(self, by: Address, left: list[Member]) -> None:
        """A view has lost members: they must have been away."""
        for member in left:
            process = self.processes[member.actor_id]
            if member.actor_id == "registry" or process.address != member.address:
                continue
            if process.state is ProcessState.RUNNING and self._is_well(member.actor_id):
                self.problems.append(f"{self.network.now():.2f}: {by} lost {member.address}, which lives")

    def _is_well(self, actor_id: str) -> bool:
        return self.network.now() - self.well_since.get(actor_id, 0.0) > BACK_S

    async def begin(self, actor_id: str) -> None:
        """Start an actor's next incarnation."""
        self.epochs[actor_id] += 1
        address = Address(actor_id, self.epochs[actor_id])
        process = self.processes[actor_id] = SimulatedProcess(address, self.network, lambda _: None)
        self.all_processes.append(process)
        actor: Any = RegistryActor(lease_s=LEASE_S)
        if actor_id != "registry":
            actor = Watcher(self) if actor_id == SUPERVISOR else Nobody(self)
        found = self.systems.get(SUPERVISOR) if actor_id not in (SUPERVISOR, BY_HAND) else None
        supervisor = (found.address, _endpoint(found.address)) if found is not None else None
        options = SystemOptions(
            host="sim", pid=1, supervisor=supervisor, random=random.Random(f"{address}/{self.seed}")
        )
        transport = MortalTransport(self.network, address, process)

        async def make() -> ActorSystem:
            return ActorSystem(actor, address, transport, self, options)

        self.well_since[actor_id] = self.network.now()
        self.systems[actor_id] = await process.spawn(make())
        await process.spawn(self.systems[actor_id].start())
        if actor_id == "registry":
            self.registry_since = self.network.now()

    async def hang(self, actor_id: str, lasts_s: float) -> None:
        """Stop an actor's process for a while."""
        self.counts[f"hung: {actor_id}"] += 1
        self.hung_since[actor_id] = self.network.now()
        self.processes[actor_id].stop()
        await asyncio.sleep(lasts_s)
        del self.hung_since[actor_id]
        self.well_since[actor_id] = self.network.now()
        self.processes[actor_id].go_on()

    async def renew(self, actor_id: str, after_s: float) -> None:
        """Kill an actor; its next incarnation comes a while later."""
        self.counts[f"died: {actor_id}"] += 1
        self.processes[actor_id].kill()
        await asyncio.sleep(after_s)
        await self.begin(actor_id)

    def look(self) -> None:
        """Who hangs longer than a lease must not be a member any more."""
        now, core = self.network.now(), self.systems["registry"].actor.core
        for actor_id, since in self.hung_since.items():
            # A registry that has just started believes others that it lives, for one lease.
            is_over = now > max(since, self.registry_since) + GONE_S
            is_here = self.processes["registry"].state is ProcessState.RUNNING
            if is_over and is_here and core.find(actor_id) is not None:
                self.problems.append(f"{now:.2f}: {actor_id} hangs since {since:.2f} and is still a member")

    def differing(self) -> list[str]:
        """Which views are not the registry's list, and who is missing there."""
        members = {str(one.address) for one in self.systems["registry"].actor.core.members()}
        wanted = {str(system.address) for system in self.systems.values()}
        found = [f"the registry has {members}, and not {wanted}"] if members != wanted else []
        for actor_id, system in self.systems.items():
            view = {str(one.address) for one in system.registration.view.all()}
            if actor_id != "registry" and view != members:
                found.append(f"{actor_id} sees {view}, and not {members}")
        return found


def _endpoint(address: Address) -> Endpoint:
    return Endpoint(f"sim://{address}/c", f"sim://{address}/d")


async def _scenario(mesh: LeasedMesh) -> list[str]:
    for actor_id in (SUPERVISOR, "registry", *SUPERVISED, BY_HAND):
        await mesh.begin(actor_id)
    await asyncio.sleep(BACK_S)
    befalling = asyncio.ensure_future(_befall(mesh))
    for _ in range(int(LOOKS_S / STEP_S)):
        await asyncio.sleep(STEP_S)
        mesh.look()
    await befalling
    mesh.network.calm()
    await asyncio.sleep(2 * LEASE_S)
    return mesh.problems + mesh.differing()


async def _befall(mesh: LeasedMesh) -> None:
    """One blow after the other, with enough between them to tell their effects apart."""
    draw = mesh.draw
    while mesh.network.now() < LOOKS_S - 25.0:
        kind = draw.choice(["hang", "hang", "supervisor", "registry", "death"])
        if kind == "hang":
            await mesh.hang(draw.choice(SUPERVISED), draw.uniform(2.0, 15.0))
        elif kind == "supervisor":
            await mesh.hang(SUPERVISOR, draw.uniform(2.0, 15.0))
        elif kind == "registry":
            await mesh.renew("registry", draw.uniform(0.2, 3.0))
        else:
            await mesh.renew(draw.choice(SUPERVISED), draw.uniform(0.1, 1.0))
        await asyncio.sleep(draw.uniform(0.5, 5.0))


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each thing happened. Raises AssertionError with the messages and the replay."""
    structlog.configure(wrapper_class=SILENT)
    mesh_of: list[LeasedMesh] = []

    async def to_its_end() -> list[str]:
        mesh = LeasedMesh(seed)
        mesh_of.append(mesh)
        try:
            problems = await _scenario(mesh)
            for system in reversed(list(mesh.systems.values())):
                await mesh.processes[system.address.actor_id].spawn(system.stop())
        finally:
            for process in mesh.all_processes:
                process.bury()
        return problems

    problems = run(to_its_end(), limit_s=600.0)
    mesh = mesh_of[0]
    told = f"replay: python -m tests.simulation leases {seed}"
    assert not problems, "\n".join([*problems, mesh.network.report(40), told])
    return mesh.counts + Counter(dict(mesh.network.counts))
