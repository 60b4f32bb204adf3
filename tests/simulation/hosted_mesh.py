"""A simulated mesh over hosts: each has its supervisor, its kv_agent and its own memory, and may be lost as a whole.

`head` has the registry and the roles at the edge, `p` a prefill group, `d` a decode group; `e`, with another decode
group, joins while the others serve, if the mesh has a joiner. KV goes between agents over `wire.py`.
"""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from typing_extensions import override

from cli.supervisor.actor import SupervisorActor
from mesh import address
from mesh.address import Address, Endpoint
from mesh.membership.view import READY
from mesh.options import SystemOptions
from mesh.system import ActorSystem
from mesh.testing.processes import ProcessState, SimulatedProcess
from mesh.wire.frames import MembersChanged
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import KVAgentConfig
from nodes.registry.actor import RegistryActor
from tests.simulation.deaths import MortalHost
from tests.simulation.returns import ReturningMesh
from tests.simulation.whole_mesh import QUANTUM_BYTES
from tests.simulation.wire import Wire, WireLinks

HEAD = "head"
PREFILL, DECODE, JOINER = "p", "d", "e"
REAPED_S = 0.01
"""Until a supervisor has heard of a death."""
SLANDER = "somebody said so"


def host_of(actor_id: str) -> str:
    """The host of an actor, which the id of any but the registry names."""
    return address.host_of(actor_id) or HEAD


def _lie(actor: SupervisorActor, dead: Address, reason: str) -> None:
    """Say that `dead` is dead, without the liar believing it."""
    bury, actor.ctx.bury = actor.ctx.bury, lambda *_: None
    try:
        actor.tell_dead(dead, reason)
    finally:
        actor.ctx.bury = bury


class _Keeper:
    """Stands in for the keeper of a supervisor's processes: here they are the mesh's."""

    def beat(self, peer: Address, state: str, progress: str) -> None:
        """No actor is killed for silence: hangs are drawn."""


@dataclass
class HostedMesh(ReturningMesh):
    """See the module. `lost` and `wrong` are actors whose host has lost their epochs, or has a clock that is behind."""

    has_joiner: bool = False

    def __post_init__(self) -> None:
        self.memories: dict[str, MortalHost] = {}
        self.down: set[str] = set()
        self.lost: set[str] = set()
        self.wrong: set[str] = set()
        self.believed: list[str] = []
        self.taken: dict[Address, dict[str, int]] = {}
        super().__post_init__()
        self.wire = Wire(self.network, self.speeds.copy_s, self.speeds.most_late, QUANTUM_BYTES)
        for host in self.hosts:
            self.makers[f"supervisor.{host}"] = lambda: SupervisorActor(_Keeper(), 1)  # type: ignore[arg-type]

    @property
    @override
    def groups(self) -> list[str]:
        more = [f"decode-0.{JOINER}"] if self.has_joiner else []
        return [f"prefill-0.{PREFILL}", f"decode-0.{DECODE}", *more]

    @property
    def hosts(self) -> list[str]:
        """All hosts that there are at some time."""
        return [HEAD, *(host_of(group) for group in self.groups)]

    def ids_of(self, host: str) -> list[str]:
        """Actors of a host, the supervisor first."""
        ids = [actor_id for actor_id in self.makers if host_of(actor_id) == host]
        return sorted(ids, key=lambda one: not one.startswith("supervisor"))

    @override
    def edge_id(self, actor_id: str) -> str:
        return f"{actor_id}.{HEAD}"

    @override
    def agent_of(self, group: str) -> str:
        return f"kv-agent-0.{host_of(group)}"

    @override
    def memory_of(self, actor_id: str) -> MortalHost:
        host = host_of(actor_id)
        return self.memories.setdefault(host, MortalHost(f"{self.seed}/{host}"))

    @override
    def _agent_config(self, groups: list[str]) -> KVAgentConfig:
        return msgspec.structs.replace(super()._agent_config(groups), host_transport="tcp")

    @override
    def _agent(self, agent: str, groups: list[str]) -> KVAgent:
        return KVAgent(self._agent_config(groups), self.memory_of(agent), {"tcp": WireLinks(self.wire)})

    @override
    def _options(self, actor_id: str, dice: random.Random) -> SystemOptions:
        host = host_of(actor_id)
        supervisor = self.processes.get(f"supervisor.{host}")
        found = None
        if supervisor is not None and supervisor.name != actor_id:
            name = f"sim://{supervisor.address}"
            found = supervisor.address, Endpoint(control=f"{name}/c", data=f"{name}/d")
        return SystemOptions(host=host, pid=1, random=dice, supervisor=found)

    # Epochs, by the files and the clock of a host.

    @override
    def has_lost_files(self, actor_id: str) -> bool:
        is_lost = actor_id in self.lost
        self.lost.discard(actor_id)
        return is_lost

    @override
    def is_clock_wrong(self, actor_id: str) -> bool:
        return actor_id in self.wrong

    @override
    def is_wanted(self, dead: Address) -> bool:
        return host_of(dead.actor_id) not in self.down and super().is_wanted(dead)

    @override
    def _on_death(self, process: SimulatedProcess) -> None:
        system = self.systems.get(process.name)
        if system is not None and system.address == process.address and system.registration.registry is None:
            self._forget_unless_joined(system)
        super()._on_death(process)
        self.wire.later(REAPED_S, self._tell_dead, process.address)

    def _forget_unless_joined(self, system: ActorSystem) -> None:
        # An actor that never joined is known to no other, not even to the registry: its epoch may come again.
        actor_id, epoch = system.address
        if not system.registration._first.done() and epoch in self.used.get(actor_id, []):
            self.used[actor_id].remove(epoch)
            self.network.bury(system.address)

    def _tell_dead(self, dead: Address) -> None:
        self._say_dead(f"supervisor.{host_of(dead.actor_id)}", dead, "killed")

    def _say_dead(self, supervisor_id: str, dead: Address, reason: str) -> bool:
        supervisor, actor = self.processes.get(supervisor_id), self.actors.get(supervisor_id)
        if supervisor is None or actor is None or supervisor.name == dead.actor_id:
            return False
        if supervisor.state is not ProcessState.RUNNING or actor.ctx.address != supervisor.address:
            return False
        supervisor.enter(_lie if reason == SLANDER else SupervisorActor.tell_dead, actor, dead, reason)
        return True

    # What happens to whole hosts.

    def cut_off(self, one: str, others: list[str], lasts_s: float, *, hold: bool, one_way: bool) -> None:
        """Nothing of one host reaches the others; nor the other way round, unless `one_way`."""
        there = [actor_id for other in others for actor_id in self.ids_of(other)]
        self.network.cut(self.ids_of(one), there, duration_s=lasts_s, hold=hold, one_way=one_way)

    async def pause(self, host: str, lasts_s: float) -> None:
        """Everything on the host stands still."""
        running = [one for one in self.ids_of(host) if one in self.processes]
        await asyncio.gather(*(self.hang(actor_id, lasts_s, kill=False) for actor_id in running))

    async def lose(self, host: str, down_s: float, *, is_remade: bool, is_behind: bool) -> None:
        """A host dies with all its memory. It returns without files if `is_remade`, its clock behind if `is_behind`."""
        self.down.add(host)
        there = [actor_id for actor_id in self.ids_of(host) if actor_id in self.processes]
        for actor_id in there:
            self.processes[actor_id].kill()
        self.memories.pop(host, None)
        if is_remade:
            # The registry keeps its file: nobody could refuse it.
            self.lost |= set(there) - {"registry"}
        if is_behind:
            self.wrong |= set(there) - {"registry"}
        await asyncio.sleep(down_s)
        self.down.discard(host)
        for actor_id in there:
            if actor_id not in self.gone:
                self._begin(actor_id, self.processes[actor_id].address.epoch)

    def _begin(self, actor_id: str, last: int) -> None:
        # A task each: one that dies while it starts would never let the next one start.
        start = self.start_actor(actor_id, self.next_epoch(actor_id, last))
        self._keep(asyncio.get_running_loop().create_task(start))

    async def join(self, host: str) -> None:
        """A host is there from now on."""
        ids = self.ids_of(host)
        self.gone -= set(ids)
        for actor_id in ids:
            self._begin(actor_id, 0)
        while any(actor_id not in self.systems for actor_id in ids):
            await asyncio.sleep(REAPED_S)

    def end(self, host: str) -> None:
        """A host dies for good, and nobody is left to say so."""
        ids = [one for one in self.ids_of(host) if one in self.processes]
        self.gone |= set(ids)
        for actor_id in ids:
            self.processes[actor_id].kill()

    async def drain_away(self, host: str) -> None:
        """A host is asked to finish, its actors in order, and does not return."""
        ids = [one for one in self.ids_of(host) if one in self.processes]
        self.gone |= set(ids)
        await self._until_started(ids)
        order = ("scheduler", "worker", "kv-agent", "supervisor")
        for actor_id in (one for role in order for one in ids if one.startswith(role)):
            # It may have died and come again since. Processes, too, are done with an actor's start before they stop it.
            await self._until_started([actor_id])
            system, process = self.systems[actor_id], self.processes[actor_id]
            await self._unless_dead(process, system.drain())
            await self._unless_dead(process, system.stop())
            process.kill()

    async def _until_started(self, actor_ids: list[str]) -> None:
        while any(
            self.processes[one].state is not ProcessState.DEAD and not self._is_started(one) for one in actor_ids
        ):
            await asyncio.sleep(0.1)

    def _is_started(self, actor_id: str) -> bool:
        system = self.systems.get(actor_id)
        return system is not None and system.describe().state == READY

    async def _unless_dead(self, process: SimulatedProcess, todo: Coroutine[Any, Any, None]) -> None:
        died = asyncio.ensure_future(self._dead.setdefault(process, asyncio.Event()).wait())
        await asyncio.wait([process.spawn(todo), died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()

    @override
    def _absent(self) -> list[str]:
        absent = super()._absent()
        if absent:
            return absent
        members = {one.address for one in self.actors["registry"].core.members()}
        present = [one for one in self.systems if one not in self.gone and one != "registry"]
        views = {one: {it.address for it in self.systems[one].registration.view.all()} for one in present}
        return [
            f"{one} knows other members than the registry: {view ^ members}"
            for one, view in views.items()
            if view != members
        ]

    def slander(self, by_host: str, victim_id: str) -> None:
        """A supervisor claims that another host's actor is dead."""
        victim = self.processes[victim_id]
        if victim.state is ProcessState.RUNNING and by_host not in self.down:
            self.counts["slandered"] += self._say_dead(f"supervisor.{by_host}", victim.address, SLANDER)

    @override
    async def start_actor(self, actor_id: str, epoch: int) -> None:
        await super().start_actor(actor_id, epoch)
        system, actor = self.systems[actor_id], self.actors[actor_id]
        self._listen(f"{system.address} gave it up", system.links, "when_lost")
        if isinstance(actor, RegistryActor):
            self._listen(f"{system.address} let it go", actor, "_tell_all")
            self._note_taken(actor, system.address)
        else:
            self._keep(self.processes[actor_id].spawn(self._forget_what_nobody_knows(system)))

    async def _forget_what_nobody_knows(self, joining: ActorSystem) -> None:
        """Epochs that no living actor remembers may come again: there is nothing to compare them with."""
        await joining.joined()
        actor_id, epoch = joining.address
        used = self.used[actor_id]
        known = max(self._remembered(one, actor_id) for one in self.systems.values() if one is not joining)
        if used[-1] == epoch and known <= epoch < max(used):
            self.used[actor_id] = [one for one in used if one <= epoch]
            self.counts["an epoch that nobody remembers"] += 1

    def _remembered(self, by: ActorSystem, actor_id: str) -> int:
        if self.processes[by.address.actor_id].state is ProcessState.DEAD:
            return 0
        if isinstance(by.actor, RegistryActor):
            return self.taken.get(by.address, {}).get(actor_id, 0)
        member = by.registration.view.get(actor_id)
        return member.epoch if member is not None else 0

    def _note_taken(self, registry: RegistryActor, address: Address) -> None:
        """Note the latest epochs that a registry has taken in, whatever it remembers of them."""
        taken, tell_all = self.taken.setdefault(address, {}), registry._tell_all

        def noting(change: MembersChanged | None) -> None:
            for member in change.upserted if change is not None else ():
                taken[member.actor_id] = max(member.epoch, taken.get(member.actor_id, 0))
            tell_all(change)

        registry._tell_all = noting  # type: ignore[method-assign]

    def _listen(self, who: str, owner: Any, name: str) -> None:
        """Note every actor that believes a slander."""
        method = getattr(owner, name)

        def listening(*arguments: Any, **options: Any) -> None:
            if SLANDER in repr(arguments):
                self.believed.append(f"{who}: {arguments}")
            method(*arguments, **options)

        setattr(owner, name, listening)
