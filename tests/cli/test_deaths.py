"""How the word of a death goes round a mesh of several hosts: a message for each host, whoever is missing."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cli.supervisor.actor import SupervisorActor
from mesh.address import Address, Endpoint
from mesh.options import SystemOptions
from mesh.system import ActorSystem
from mesh.transport.base import Channel
from mesh.wire.frames import PeerDown
from tests.mesh.mesh_under_test import Mesh, Recorder, Say, simulated_mesh, until

pytestmark = pytest.mark.virtual_time

HOSTS = "abc"
VICTIM = Address("x.a", 1)
REAPED = "reaped"


class NoKeeper:
    """What a supervisor's actor has for its processes: here there are none."""

    def beat(self, peer: Address, state: str, progress: str) -> None:
        """An actor lives."""


class Hosts:
    """Three hosts, each with a supervisor and the actors `x` and `y`, and who was started by hand on a fourth."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sent: list[tuple[str, str, PeerDown]] = []

    async def start(self) -> None:
        """All of them, linked with nobody but their hubs, but that `y` of b has spoken to the one that is to die."""
        await self.mesh.start_registry()
        for host in HOSTS:
            supervisor: Any = SupervisorActor(NoKeeper(), 1)  # type: ignore[arg-type]
            system = await self._start(f"supervisor.{host}", host, supervisor)
            for name in ("x", "y"):
                await self._start(f"{name}.{host}", host, Recorder(), system.address)
        await self._start("lone", "d", Recorder())
        await until(lambda: all(len(one.registration.view.all()) == 11 for one in self.others("registry")))
        await self.mesh.systems["y.b"].actor.ctx.ask("x.a", Say(text="hi"), timeout_s=1.0)
        await self.mesh.kill(self.mesh.systems["x.a"])

    async def _start(self, name: str, host: str, actor: Any, by: Address | None = None) -> ActorSystem:
        where = None if by is None else (by, Endpoint(f"sim://{by}/c", f"sim://{by}/d"))
        system = await self.mesh.start(name, 1, actor, SystemOptions(host=host, pid=1, supervisor=where))
        tell = system.tells.tell

        def counted(actor_id: str, message: Any, *arguments: Any, **options: Any) -> bool:
            if isinstance(message, PeerDown):
                self.sent.append((name, actor_id, message))
            return tell(actor_id, message, *arguments, **options)

        system.actor.ctx.tell = counted
        return system

    def others(self, *without: str) -> list[ActorSystem]:
        """All that are to hear of it, but some."""
        return [one for name, one in self.mesh.systems.items() if name not in ("x.a", *without)]

    def tell(self, dead: Address = VICTIM, by: str = "a") -> None:
        """Its supervisor has reaped it."""
        self.mesh.systems[f"supervisor.{by}"].actor.tell_dead(dead, REAPED)

    def say(self, by: str, to: str, said_by: str, dead: str = "x.a") -> None:
        """Anything, as a supervisor should not."""
        down = PeerDown(actor_id=dead, epoch=1, reason="a lie", said_by=said_by)
        self.mesh.systems[by].actor.ctx.tell(to, down, channel=Channel.CONTROL)

    async def all_know(self, *without: str) -> None:
        """Soon after it was told, and not as late as silence or a lease would say it."""
        await until(lambda: not any(one.registration.view.get("x.a") for one in self.others(*without)), 0.05)

    async def is_refused(self, to: str) -> None:
        """One frame."""
        refused = self.mesh.systems[to].metrics
        await until(lambda: refused.value("mesh_frames_refused_total", code="unexpected") == 1)
        assert len(self.mesh.systems[to].registration.view.all()) == 11


@pytest.fixture
@contextlib.asynccontextmanager
async def hosts() -> AsyncIterator[Hosts]:
    async with simulated_mesh() as mesh:
        hosts = Hosts(mesh)
        await hosts.start()
        yield hosts


async def test_a_death_costs_a_message_for_each_other_host_and_is_told_on_there_once(hosts: Hosts) -> None:
    await hosts.mesh.kill(hosts.mesh.registry)
    hosts.tell()
    await hosts.all_know("registry")
    assert hosts.mesh.systems["y.b"].actor.lost[-1] == (VICTIM, REAPED)
    sent = [(by, to, down.said_by) for by, to, down in hosts.sent if to != "registry"]
    assert sent == [
        ("supervisor.a", "y.a", ""),
        ("supervisor.a", "supervisor.b", ""),
        ("supervisor.a", "supervisor.c", ""),
        ("supervisor.a", "lone", ""),
        *((f"supervisor.{host}", f"{name}.{host}", "supervisor.a") for host in "bc" for name in "xy"),
    ]


async def test_actors_whose_supervisor_is_no_member_are_told_without_it(hosts: Hosts) -> None:
    await hosts.mesh.systems["supervisor.b"].stop()
    await until(lambda: hosts.mesh.systems["supervisor.a"].registration.view.get("supervisor.b") is None)
    await hosts.mesh.kill(hosts.mesh.registry)
    hosts.tell()
    await hosts.all_know("registry", "supervisor.b")
    told = [to for by, to, _ in hosts.sent if by == "supervisor.a"]
    assert [to for to in told if to.endswith(".b")] == ["x.b", "y.b"]


async def test_what_a_supervisor_that_hangs_does_not_tell_on_the_registry_says(hosts: Hosts) -> None:
    await hosts.mesh.kill(hosts.mesh.systems["supervisor.b"])
    hosts.tell()
    await hosts.all_know("supervisor.b")
    assert not any(by == "supervisor.b" for by, _, _ in hosts.sent)


async def test_the_next_registry_is_told_of_nobody_who_died_while_there_was_none(hosts: Hosts) -> None:
    await hosts.mesh.kill(hosts.mesh.registry)
    hosts.tell()
    await hosts.all_know("registry")
    registry = await hosts.mesh.start_registry(2)
    there = {one.address for one in hosts.others("registry")}
    await until(lambda: {one.address for one in registry.actor.core.audience()} >= there)
    assert registry.actor.core.find("x.a") is None


LIES = {
    "of another host's actor to its own": ("supervisor.b", "y.b", ""),
    "of the registry, which is another host's, to its own": ("supervisor.b", "y.b", "", "registry"),
    "as told by one that is not of that host": ("supervisor.b", "y.b", "supervisor.c"),
    "as told by the right one, to another host's actor": ("supervisor.c", "y.b", "supervisor.a"),
    "as told by the right one, to another supervisor": ("supervisor.c", "supervisor.b", "supervisor.a"),
    "as told by the right one, by an actor": ("x.b", "y.b", "supervisor.a"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_refused_and_goes_no_further(hosts: Hosts, lie: str) -> None:
    by, to, *words = LIES[lie]
    hosts.say(by, to, *words)
    await hosts.is_refused(to)
    assert len(hosts.sent) == 1
