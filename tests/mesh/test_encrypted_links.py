"""Between hosts with keys: who has none, another's, or one that was revoked is refused, counted and logged once."""

import contextlib
import os
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from mesh.address import Address, Endpoint
from mesh.errors import CallError, PeerLost, RemoteError
from mesh.membership.keys import HostKey
from mesh.membership.view import Member, StaticBootstrap
from mesh.runtime.key_files import KeyDirectory, KeyRing
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from mesh.wire.codec import Codec
from mesh.wire.frames import Ping
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import QUICK, Number, Recorder, Say, Step, until
from tests.mesh.two_hosts import TwoHosts, allow

HI = Say(text="hi")
ATTACKER = "127.0.0.4"


class World(TwoHosts):
    """Two hosts with keys and an actor each, and attackers that dial the registry and the head's actor."""

    def __init__(self, path):
        super().__init__(path, keys=True)
        self.path = path

    async def up(self):
        self.registry = await self.start("registry", RegistryActor(self.hosts["head"][0], lease_s=1.0), epoch=5)
        self.x, self.y = await self.start("x.head"), await self.start("y.d", None, "d")
        await until(lambda: self.x.registration.view.get("y.d") and self.y.registration.view.get("x.head"))

    async def down(self):
        for system in (self.y, self.x, self.registry):
            await system.stop()

    def ring(self, pair, *others):
        """An attacker's keys. It knows the head's public one, which is no secret."""
        directory = KeyDirectory(self.path / os.urandom(4).hex())
        directory.write_key(pair)
        directory.write_allowed(allow(self.pairs["head"], *others))
        return KeyRing(directory)

    def by_tcp(self, pair):
        return ZeroMQOptions(bind=ATTACKER, keys=self.ring(pair))

    async def attack(self, name, listen, *, epoch=1, host="", role="recorder"):
        """Join, and ask the head's actor: neither comes off. Returns which refusals were counted meanwhile."""
        is_far = listen.run_directory is None
        where = [system.describe().endpoint for system in (self.registry, self.x)]
        there = [Endpoint(one.control, one.data) if is_far else one.on_its_host for one in where]
        actor = Recorder()
        actor.role = role
        options = replace(QUICK, host=host, join_timeout_s=0.3)
        bootstrap = StaticBootstrap(self.registry.address, there[0])
        system = ActorSystem(actor, Address(name, epoch), ZeroMQTransport(listen), bootstrap, options)
        before = self.refused()
        await system.start()
        system.registration.view.reset(1, 1, [Member("x.head", "recorder", 1, there[1])])
        with pytest.raises(CallError):
            # Whoever takes a name would ask itself by it.
            await actor.ctx.ask(*(("x.head", HI) if name != "x.head" else ("registry", Ping())), timeout_s=0.7)
        await system.stop()
        known = self.registry.actor.core.find(name)
        assert known is None or known.address != system.address or known == self.y.describe()
        assert system.registration.registry is None
        return {
            code: count - before.get(code, 0) for code, count in self.refused().items() if count > before.get(code, 0)
        }

    def refused(self):
        """Refusals at the two that are attacked, by code."""
        found = {}
        for system in (self.registry, self.x):
            for series, value in system.stats().counters.items():
                if series.startswith("mesh_frames_refused_total"):
                    code = series.split('"')[1]
                    found[code] = found.get(code, 0) + value
        return found

    def revoke(self, host):
        left = [pair for name, pair in self.pairs.items() if name != host]
        self.key_directory("head").write_allowed(allow(*left, version=2))


async def test_who_may_not_is_refused_counted_and_logged_once(world):
    stranger, d = HostKey.new("d"), world.pairs["d"]
    insecure = ZeroMQOptions(bind=ATTACKER, insecure=True)
    local = ZeroMQOptions(run_directory=world.hosts["head"][0])
    with capture_logs() as logs:
        for code, name, listen, shown in (
            # Whichever of the two sides of the handshake finds out first that the other speaks something else.
            ("bad_header no_handshake", "z.d", insecure, {"host": "d"}),
            ("unknown_key", "z.d", world.by_tcp(stranger), {"host": "d"}),
            ("wrong_key", "z.head", world.by_tcp(d), {"host": "d"}),
            ("wrong_key", "x.head", world.by_tcp(d), {"host": "head", "epoch": 9}),
            ("wrong_key", "registry", world.by_tcp(d), {"host": "d", "epoch": 9}),
            ("wrong_key", "z", world.by_tcp(d), {"host": "d"}),
            ("wrong_key", "z.d", world.by_tcp(d), {"host": "head"}),
            ("wrong_role", "z.d", world.by_tcp(d), {"host": "d", "role": "registry"}),
            ("wrong_key", "y.d", local, {"host": "d", "epoch": 9}),
        ):
            # Not only: what ZeroMQ says of a connection that was refused before may come late.
            assert {*code.split()} & {*await world.attack(name, listen, **shown)}, (code, name, shown)
    assert (await world.y.actor.ctx.ask("x.head", HI, timeout_s=2)).message == HI
    assert (await world.x.actor.ctx.ask("y.d", HI, timeout_s=2)).message == HI
    said = [(entry["actor"], entry["peer"], entry["code"]) for entry in logs if entry["event"] == "frame refused"]
    ours = [one for one in said if one[0] in ("registry", "x.head") and "#9" not in one[1]]
    assert len(ours) == len(set(ours)) > 0


class Careful(Recorder):
    """Takes what `Say` says of recorders alone, and numbers and steps of its own host alone."""

    codec = Codec(Say | Number, Step, senders={Say: ("recorder",), Step: ("counter",), Number: ("counter",)})


async def test_what_a_role_may_not_send_is_refused_of_another_host_and_taken_of_the_own(world):
    careful = await world.start("careful.d", Careful(), "d")
    near, far = world.y.actor.ctx, world.x.actor.ctx
    await until(lambda: near.members.get("careful.d") and far.members.get("careful.d"))
    for ctx in (near, far):
        assert (await ctx.ask("careful.d", HI, timeout_s=2)).message == HI
    with pytest.raises(RemoteError, match=r"x\.head#1 \(role 'recorder'\) may not send Number") as refused:
        await far.ask("careful.d", Number(2), timeout_s=2)
    assert refused.value.code == "not_permitted"
    assert (await near.ask("careful.d", Number(1), timeout_s=2)).message == Number(1)
    far.tell("careful.d", Step(1))
    near.tell("careful.d", Step(2))
    # Behind the tell, on the same channel of the same link.
    assert (await far.ask("careful.d", HI, timeout_s=2)).message == HI
    await until(lambda: careful.actor.told)
    assert [message for _, message, _ in careful.actor.told] == [Step(2)]
    assert careful.stats().counters['mesh_frames_refused_total{code="not_permitted"}'] == 2
    await careful.stop()


async def test_a_key_that_is_revoked_ends_its_connections_at_once(world):
    assert (await world.y.actor.ctx.ask("x.head", HI, timeout_s=2)).message == HI
    with capture_logs() as logs:
        world.revoke("d")
        await until(lambda: not world.x.links.get("y.d") and not world.registry.links.get("y.d"))
        before = world.refused().get("unknown_key", 0)
        # It has not heard of it, and its sockets are open still: it is not taken again, nor is what it says.
        with pytest.raises(CallError):
            await world.y.actor.ctx.ask("x.head", HI, timeout_s=1)
        await until(lambda: world.refused().get("unknown_key", 0) > before)
        await until(lambda: not world.registry.actor.core.knows(world.y.address), 3)
        with pytest.raises(CallError):
            await world.x.actor.ctx.ask("y.d", HI, timeout_s=1)
    reasons = [str(entry.get("reason", "")) for entry in logs]
    assert any("revoked" in reason for reason in reasons)
    add = f"on host head: `meshctl keys add d '{world.pairs['d'].public_key}' --name {world.hosts['d'][0].mesh}`"
    assert any(f"not allowed there, not yet or no longer: {add}" in reason for reason in reasons), reasons
    # Allowed again it is back by itself.
    world.key_directory("head").write_allowed(allow(*world.pairs.values(), version=3))
    await until(lambda: world.registry.actor.core.knows(world.y.address), 10)
    with pytest.raises(PeerLost):
        # The first word on a connection of before finds out that the other end has forgotten it.
        await world.y.actor.ctx.ask("x.head", HI, timeout_s=5)
    assert (await world.y.actor.ctx.ask("x.head", HI, timeout_s=5)).message == HI


async def test_a_key_that_was_added_is_known_at_once(world):
    """And not only after the next look: a script starts a host right after `meshctl keys add`."""
    late, there = HostKey.new("e"), world.registry.describe().endpoint
    listen = ZeroMQOptions(bind=ATTACKER, keys=world.ring(late))
    bootstrap = StaticBootstrap(world.registry.address, Endpoint(there.control, there.data))
    options = replace(QUICK, host="e", join_timeout_s=0.3)
    system = ActorSystem(Recorder(), Address("z.e", 1), ZeroMQTransport(listen), bootstrap, options)
    world.key_directory("head").write_allowed(allow(*world.pairs.values(), late, version=2))
    await system.start()
    await until(lambda: world.registry.actor.core.knows(system.address))
    assert world.refused()["unknown_key"] == 0
    await system.stop()


async def test_who_listens_has_to_have_the_key_of_its_host(world):
    """Somebody else at the address of the head's actor is not spoken to."""
    thief = ZeroMQTransport(world.by_tcp(HostKey.new("head")))
    heard = []

    class Ear:
        def on_frames(self, link, channel, parts):
            heard.append(parts)

        def on_refused(self, link, refusal):
            heard.append(refusal)

        def on_link_down(self, link, reason):
            pass

        def on_some_link_down(self):
            pass

    where = await thief.start(Address("x.head", 2), Ear())
    stolen = Member("x.head", "recorder", 2, where, host="head")
    world.y.registration.view.reset(9, 9, [stolen])
    world.y.links.lose(Address("x.head", 1), "stolen")
    with pytest.raises(CallError):
        await world.y.actor.ctx.ask("x.head", HI, timeout_s=0.7)
    assert [parts for parts in heard if parts] == [], "but for connections that never were any"
    unknown = Member("z.e", "recorder", 1, where, host="e")
    world.y.registration.view.reset(9, 10, [unknown])
    with pytest.raises(CallError, match="keys add"):
        await world.y.actor.ctx.ask("z.e", HI, timeout_s=0.7)
    await thief.stop()


@pytest.fixture
@contextlib.asynccontextmanager
async def world(short_path, once_per_process):
    world = World(short_path)
    await world.up()
    try:
        yield world
    finally:
        await world.down()
