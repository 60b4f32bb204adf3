"""Who sends heartbeats to whom, and what is answered, on virtual time."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import pytest

from mesh.actor import Actor
from mesh.address import Address
from mesh.membership.view import SUPERVISOR
from mesh.options import SystemOptions
from mesh.simulation.network import SimulatedNetwork
from mesh.testing.actors import Actors
from mesh.wire.codec import Codec
from mesh.wire.frames import SYSTEM_CODEC, Heartbeat, Ping, Renew, Renewed
from mesh.wire.header import Verb
from nodes.registry.actor import RegistryActor

pytestmark = pytest.mark.virtual_time
LEASE_S = 5.0


class Nobody(Actor):
    role = "nobody"
    codec = Codec(Ping)


class Supervisor(Nobody):
    role = SUPERVISOR

    def __init__(self):
        self.beats = []

    def on_heartbeat(self, peer, state, progress):
        self.beats.append((str(peer), state))


class Host(Actors):
    """A supervisor, the registry that it started, and actors; `said` counts the heartbeats: (from, to, body)."""

    def __init__(self):
        super().__init__(SimulatedNetwork(3))
        self.said = Counter()
        self.bodies = []

    async def begin(self, host="h", actor_ids=("a", "b")):
        self._options = SystemOptions(host=host, pid=1)
        supervisor = await self.add("supervisor", Supervisor(), waits=False)
        self._options = replace(self._options, supervisor=(supervisor.address, supervisor.describe().endpoint))
        await self.add("registry", RegistryActor(lease_s=LEASE_S))
        for actor_id in actor_ids:
            await self.add(actor_id, Nobody())
        await supervisor.joined()
        await asyncio.sleep(3.0)

    async def add(self, actor_id, actor, waits=True):
        system = await self.start(actor_id, actor, waits=waits)
        handle = system.links.handlers[Verb.HEARTBEAT]

        def heard(peer, channel, header, parts):
            body = SYSTEM_CODEC.decode(parts[1])
            self.said[peer.address.actor_id, actor_id, type(body).__name__] += 1
            self.bodies.append(body)
            handle(peer, channel, header, parts)

        system.links.handlers[Verb.HEARTBEAT] = heard
        return system

    def members(self):
        return [str(member.address) for member in self.systems["registry"].actor.core.members()]

    def hears_nothing(self, actor_id, sender):
        """A message handler of `actor_id` that drops the heartbeats of one actor from now on."""
        handle = self.systems[actor_id].links.handlers[Verb.HEARTBEAT]
        self.systems[actor_id].links.handlers[Verb.HEARTBEAT] = lambda peer, *frame: (
            None if peer.address.actor_id == sender else handle(peer, *frame)
        )


@pytest.fixture
@contextlib.asynccontextmanager
async def host():
    host = Host()
    await host.begin()
    yield host
    await host.stop()


async def test_on_one_host_an_actor_sends_one_heartbeat_and_gets_none(host):
    host.said.clear()
    await asyncio.sleep(60.0)
    assert host.members() == ["a#1", "b#1", "registry#1", "supervisor#1"]
    ups = {(sender, "supervisor", "Renew") for sender in ("a", "b", "registry")}
    beside = {("supervisor", "registry", "Renew"), ("registry", "supervisor", "Heartbeat")}
    assert host.said.keys() == ups | beside
    assert all(119 <= host.said[one] <= 121 for one in ups), "twice a second"
    assert all(29 <= host.said[one] <= 31 for one in beside), "each 2 s"


async def test_who_has_no_supervisor_renews_its_lease_itself_and_is_answered(host):
    host._options = replace(host._options, supervisor=None)
    await host.add("by-hand", Nobody())
    host.said.clear()
    await asyncio.sleep(30.0)
    assert 59 <= host.said["by-hand", "registry", "Renew"] <= 61
    assert 59 <= host.said["registry", "by-hand", "Heartbeat"] <= 61
    assert ("by-hand", "supervisor", "Renew") not in host.said


async def test_between_hosts_heartbeats_go_to_the_registry_and_are_answered(host):
    host._options = replace(host._options, host="other", supervisor=None)
    there = await host.add("supervisor.other", Supervisor())
    host._options = replace(host._options, supervisor=(there.address, there.describe().endpoint))
    await host.add("c.other", Nobody())
    host.said.clear()
    await asyncio.sleep(30.0)
    for sender in ("supervisor.other", "c.other"):
        assert 59 <= host.said[sender, "registry", "Renew"] <= 61
        assert 59 <= host.said["registry", sender, "Heartbeat"] <= 61
    assert 59 <= host.said["c.other", "supervisor.other", "Renew"] <= 61
    assert ("supervisor.other", "c.other", "Heartbeat") not in host.said


async def test_a_peer_that_wants_answers_from_a_supervisor_gets_them(host):
    """As every actor did before supervisors renewed leases."""
    a, before = host.systems["a"], host.said["supervisor", "a", "Heartbeat"]
    a.links.send(a.links.reach("supervisor"), 0, Verb.HEARTBEAT, b"\x82\xa4type\xa5Renew\xa5state\xa5ready")
    await asyncio.sleep(0.1)
    assert host.said["supervisor", "a", "Heartbeat"] == before + 1
    assert host.bodies[-1] == Heartbeat()


async def test_who_falls_silent_is_no_member_a_lease_later(host):
    host.network.hang(Address("a", 1))
    await asyncio.sleep(LEASE_S - 0.5)
    assert "a#1" in host.members()
    await asyncio.sleep(0.6)
    assert "a#1" not in host.members()
    assert "b#1" in host.members()


async def test_when_the_supervisor_stands_still_the_registry_asks_actors_themselves(host):
    host.systems["supervisor"].heartbeats.close()
    host.hears_nothing("supervisor", "a")
    host.hears_nothing("supervisor", "b")
    host.hears_nothing("supervisor", "registry")
    host.said.clear()
    await asyncio.sleep(20.0)
    assert host.members() == ["a#1", "b#1", "registry#1"], "its own lease nobody renews"
    # 3 s after the last one, rounded up to a beat.
    assert 5 <= host.said["registry", "a", "Heartbeat"] <= 2 * host.said["a", "registry", "Renew"] <= 14


async def test_a_missed_change_is_found_by_the_supervisor(host):
    a = host.systems["a"]
    a.registration.view.version -= 1
    assert a.registration.view.forget(Address("b", 1))
    await asyncio.sleep(1.5)
    assert a.registration.view.get("b") is not None
    assert Heartbeat(registry_epoch=1, version=a.registration.view.version) in host.bodies


async def test_who_holds_no_lease_is_told_so(host):
    core = host.systems["registry"].actor.core
    host.systems["registry"].actor._tell_all(core.leave(Address("a", 1), "a mistake"))
    assert "a#1" not in host.members()
    await asyncio.sleep(2.6)
    assert "a#1" in host.members()


async def test_a_registry_that_returns_has_everybody_again_and_nobody_has_left(host):
    left = []
    host.systems["a"].actor.on_members = lambda _joined, gone, _changed: left.extend(str(one.address) for one in gone)
    await host.kill("registry")
    await asyncio.sleep(3.0)
    await host.add("registry", RegistryActor(lease_s=LEASE_S))
    await asyncio.sleep(2 * LEASE_S)
    assert host.members() == ["a#1", "b#1", "registry#2", "supervisor#1"]
    assert left == ["registry#1"]
    host.said.clear()
    await asyncio.sleep(10.0)
    assert ("a", "registry", "Renew") not in host.said, "as before"


@pytest.mark.parametrize("sender", ["a", "supervisor.other"])
async def test_who_is_not_its_supervisor_renews_nobodys_lease(host, sender):
    if sender != "a":
        host._options = replace(host._options, host="other", supervisor=None)
        await host.add(sender, Supervisor())
    core, system = host.systems["registry"].actor.core, host.systems[sender]
    before = core._expiry["b"]
    forged = Renew(renewed=[Renewed("b", 1, 0), Renewed("x", 1, 0)], next_in=0)
    host.hears_nothing("registry", "supervisor")
    peer = system.links.reach("registry")
    system.links.send(peer, 0, Verb.HEARTBEAT, SYSTEM_CODEC.encode(forged))
    await asyncio.sleep(0.1)
    assert core._expiry["b"] == before
    assert not host.bodies[-1].unknown


async def test_a_renewal_of_an_earlier_incarnation_renews_nothing(host):
    supervisor, core = host.systems["supervisor"], host.systems["registry"].actor.core
    assert not core.renew_for(Address("b", 7), 100.0)
    late = Renew(renewed=[Renewed("b", 7, 0)], next_in=4)
    supervisor.links.send(supervisor.links.reach("registry"), 0, Verb.HEARTBEAT, SYSTEM_CODEC.encode(late))
    await asyncio.sleep(0.01)
    assert core.next_expiry() < 100.0
    assert any(isinstance(body, Heartbeat) and body.unknown == ["b"] for body in host.bodies)
    assert any(isinstance(body, Heartbeat) and not body.known for body in host.bodies), "b is told to join again"
