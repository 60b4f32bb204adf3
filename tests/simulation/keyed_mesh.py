"""A simulated mesh over hosts with keys: each has its pair and its copy of the list, which the head's supervisor sends.

The list, its push, what an actor vets and whose frames it accepts are as in production; the files are in memory, and a
connection has the user that stands for its dialer's key.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

from typing_extensions import override

from cli.supervisor.actor import SupervisorActor
from mesh.address import Address, Endpoint
from mesh.errors import CallError, FrameRefused
from mesh.membership.keys import AllowedHost, AllowList, HostKey
from mesh.membership.proof import REGISTRY
from mesh.membership.view import Member
from mesh.options import SystemOptions
from mesh.runtime.key_files import KeyRing
from mesh.system import ActorSystem
from mesh.testing.processes import ProcessState, SimulatedProcess
from mesh.transport.base import Buffer, Channel, Link, Listener
from mesh.transport.guard import LOCAL, Guard
from mesh.transport.zeromq_zap import POLL_S
from mesh.wire.frames import Join
from nodes.registry.actor import RegistryActor
from nodes.registry.config import RegistryConfig
from nodes.roles import WORKER
from tests.simulation.deaths import MortalTransport
from tests.simulation.hosted_mesh import HEAD, REAPED_S, HostedMesh, _Keeper, host_of
from tests.simulation.strangers import LATER, Stranger

GOSSIP_S = 1.0
LATE_S = 4 * POLL_S
"""How long an actor may go by the previous list, unless it stands still for longer."""
SPEC = {"model": "echo", "release": "1"}

new_key = cache(HostKey.new)


class HeldKeys:
    """The key files of one host, in memory; as `KeyDirectory`."""

    def __init__(self, own: HostKey, registry: HostKey, now: Callable[[], float]) -> None:
        self.own, self._registry, self._now = own, registry, now
        self.num_written = 0
        self.found: list[str] = []
        self.allowed_file = SimpleNamespace(stat=self._stat)
        self.lose()

    def lose(self) -> None:
        """Keep only what a token gives to a host that joins."""
        own = [AllowedHost(self.own.host, self.own.public_key)] if self.own != self._registry else []
        self.put(AllowList(0, (AllowedHost(HEAD, self._registry.public_key, ("*", "registry")), *own)))

    def put(self, allowed: AllowList) -> None:
        """Replace the list, whatever it was, as if by hand."""
        self.allowed = allowed
        self.changed_at = self._now()
        self.num_written += 1

    def _stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_ino=self.num_written, st_mtime_ns=0, st_ctime_ns=0, st_size=0)

    def read_key(self) -> HostKey:
        return self.own

    def read_allowed(self) -> AllowList:
        return self.allowed

    def write_allowed(self, allowed: AllowList) -> None:
        if allowed.version <= self.allowed.version:
            self.found.append(
                f"host {self.own.host} had version {self.allowed.version} of the list, and took {allowed.version}"
            )
        self.put(allowed)


class KeyedTransport(MortalTransport):
    """A transport that takes what its guard lets pass. A dialer is the user of its host's key, if that is allowed."""

    def __init__(self, mesh: "KeyedMesh", address: Address, process: SimulatedProcess) -> None:
        super().__init__(mesh.network, address, process)
        self._mesh, self._ring, self._host = mesh, mesh.rings[address.actor_id], host_of(address.actor_id)
        self.guard = Guard(self._ring)
        self._accepted: dict[Link, bytes] = {}
        self._far: set[Link] = set()

    @override
    async def start(self, address: Address, listener: Listener) -> Endpoint:
        self._listener = listener
        self._poll()
        return await super().start(address, self)

    @override
    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        link = super().dial(peer, endpoint)
        if host_of(peer.actor_id) == self._host:
            return link
        try:
            self.guard.server_key(peer.actor_id)
            self._far.add(link)
        except FrameRefused as refusal:
            asyncio.get_running_loop().call_soon(self._end, link, refusal.message)
        return link

    def on_frames(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> None:
        """Frames have come."""
        if not link.dialed:
            try:
                self.guard.vet(self._user(link), link.peer.actor_id)
            except FrameRefused as refusal:
                self._mesh.counts["refused by key"] += 1
                self._listener.on_refused(link, refusal)
                return
        self._mesh.look_at(self._host, link.peer)
        self._listener.on_frames(link, channel, parts)

    def on_link_down(self, link: Link, reason: str) -> None:
        """A connection has ended."""
        self._accepted.pop(link, None)
        self._far.discard(link)
        self._listener.on_link_down(link, reason)

    def on_some_link_down(self) -> None:
        """Passed on as it is."""
        self._listener.on_some_link_down()

    def _user(self, link: Link) -> bytes:
        if (user := self._accepted.get(link)) is None:
            host = host_of(link.peer.actor_id)
            user = LOCAL if host == self._host else self.guard.user_of(self._mesh.files[host].own.public_key)
            if user is None:
                return f"{host} not allowed".encode()
            self._accepted[link] = user
        return user

    def _end(self, link: Link, reason: str) -> None:
        self.close_link(link)
        self.on_link_down(link, reason)

    def _poll(self) -> None:
        asyncio.get_running_loop().call_later(POLL_S, self._poll)
        if not self.guard.is_changed():
            return
        revoked = [link for link, user in self._accepted.items() if self.guard.host_of_user(user) is None]
        revoked += [
            link
            for link in self._far
            if not self.guard.is_current(self._mesh.files[host_of(link.peer.actor_id)].own.public_key.encode())
        ]
        for link in revoked:
            self._end(link, "the key of its host was revoked")


@dataclass
class KeyedMesh(HostedMesh):
    """See the module. `wrong_spec` is a host that takes the mesh for another; `revoked` hosts are off the list."""

    wrong_spec: str = ""

    def __post_init__(self) -> None:
        self.files: dict[str, HeldKeys] = {}
        self.rings: dict[str, KeyRing] = {}
        self.revoked: set[str] = set()
        self.paused_until = 0.0
        self.found: list[str] = []
        super().__post_init__()
        for host in self.hosts:
            self.files[host] = HeldKeys(new_key(host), new_key(HEAD), self.network.now)
            self.makers[f"supervisor.{host}"] = lambda host=host: SupervisorActor(
                _Keeper(),  # type: ignore[arg-type]
                1,
                self.rings[f"supervisor.{host}"],
            )
        self.makers["registry"] = lambda: RegistryActor(config=RegistryConfig(spec=SPEC))

    def say(self, change: Callable[[AllowList], AllowList]) -> None:
        """Change the list at the registry's host, as `meshctl keys` does there."""
        held = self.files[HEAD]
        held.put(change(held.allowed))

    def add(self, host: str, roles: tuple[str, ...] | None = None) -> None:
        """Allow a host, with these roles or any but the registry's."""
        self.say(lambda allowed: allowed.with_host(host, new_key(host).public_key, roles))

    def revoke(self, host: str) -> None:
        """Shut a host out; it goes on, and does not know."""
        self.revoked.add(host)
        self.gone |= set(self.ids_of(host))
        self.say(lambda allowed: allowed.without(host))

    def look_at(self, host: str, peer: Address) -> None:
        """An actor of the host takes what a peer says: note it if that is long after the peer's key left the list."""
        held, now = self.files[host], self.network.now()
        if host_of(peer.actor_id) == host:
            return
        is_late = now > max(held.changed_at, self.paused_until) + LATE_S
        if is_late and held.allowed.host(host_of(peer.actor_id)) is None:
            self.found.append(f"host {host} takes what {peer} says, whose key is not on its list")

    @override
    async def pause(self, host: str, lasts_s: float) -> None:
        self.paused_until = max(self.paused_until, self.network.now() + lasts_s)
        await super().pause(host, lasts_s)

    @override
    async def lose(self, host: str, down_s: float, *, is_remade: bool, is_behind: bool) -> None:
        if is_remade and host != HEAD:
            self.files[host].lose()
        await super().lose(host, down_s, is_remade=is_remade, is_behind=is_behind)

    @override
    async def start_actor(self, actor_id: str, epoch: int) -> None:
        self.rings[actor_id] = KeyRing(self.files[host_of(actor_id)])  # type: ignore[arg-type]
        await super().start_actor(actor_id, epoch)

    @override
    def _transport(self, address: Address, process: SimulatedProcess) -> MortalTransport:
        return KeyedTransport(self, address, process)

    @override
    def _options(self, actor_id: str, dice: random.Random) -> SystemOptions:
        spec = SPEC | ({"model": "tiny"} if host_of(actor_id) == self.wrong_spec else {})
        return replace(super()._options(actor_id, dice), spec=spec, vet_host=self.rings[actor_id].vet)

    async def gossip(self, actor_id: str, named: Sequence[Member]) -> bool:
        """A worker on a host that runs nothing else joins and names others. Returns whether it was heard."""
        host, address = host_of(actor_id), Address(actor_id, 1)
        self.gone.add(f"supervisor.{host}")
        self.files[host] = HeldKeys(new_key(host), new_key(HEAD), self.network.now)
        self.rings[actor_id] = KeyRing(self.files[host])  # type: ignore[arg-type]
        options = replace(self._options(actor_id, random.Random(f"{address}/{self.seed}")), supervisor=None)
        process = SimulatedProcess(address, self.network, lambda _: None)

        async def say() -> bool:
            system = ActorSystem(Stranger(WORKER), address, self._transport(address, process), self.bootstrap, options)
            await system.start()
            try:
                join = Join(member=system.describe(), known_members=list(named), spec=SPEC)
                await system.actor.ctx.ask(REGISTRY, join, timeout_s=GOSSIP_S)
            except CallError:
                return False
            finally:
                await system.stop()
            return True

        return await process.spawn(say())

    async def intrude(self, host: str) -> None:
        """Start a host that takes the mesh for another."""
        for actor_id in self.ids_of(host):
            self._begin(actor_id, 0)
            await asyncio.sleep(REAPED_S)

    @override
    def _absent(self) -> list[str]:
        allowed = self.files[HEAD].allowed
        behind = [
            f"host {host} has version {held.allowed.version} of the list, which is at {allowed.version}"
            for host, held in self.files.items()
            if f"supervisor.{host}" not in self.gone and held.allowed != allowed
        ]
        return super()._absent() + behind

    @override
    async def stop(self) -> None:
        for actor_id in self.gone & self.processes.keys():
            if self.processes[actor_id].state is not ProcessState.DEAD:
                self.processes[actor_id].kill()
        await super().stop()

    def problems(self) -> list[str]:
        """What was seen and must not happen."""
        ended = [
            f"{one} goes above an epoch that was made up" for one, used in self.used.items() if used[-1:] > [LATER]
        ]
        return [*self.found, *ended, *(one for held in self.files.values() for one in held.found)]


def first_list(hosts: Sequence[str]) -> AllowList:
    """The first list, of these hosts."""
    others = [AllowedHost(host, new_key(host).public_key) for host in hosts if host != HEAD]
    head = AllowedHost(HEAD, new_key(HEAD).public_key, ("*", "registry"))
    return AllowList(1, tuple(sorted((head, *others), key=lambda one: one.host)))
