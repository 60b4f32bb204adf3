"""Actors and a small protocol that the tests of `mesh/` speak."""

import asyncio
import contextlib

from mesh.actor import Actor
from mesh.address import Address
from mesh.options import SystemOptions
from mesh.runtime.run_directory import RunDirectory
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from mesh.wire.codec import Codec
from mesh.wire.message import HotMessage, Message
from nodes.registry.actor import RegistryActor


class Say(Message, frozen=True):
    text: str = ""


class Number(Message, frozen=True):
    value: int


class Step(HotMessage, frozen=True):
    step: int
    token_ids: list[int] = []


CODEC = Codec(Say | Number, Step)
QUICK = SystemOptions(
    heartbeat_s=0.15, hello_timeout_s=1.5, join_timeout_s=1.5, retry_min_s=0.01, retry_max_s=0.1,
    renew_subscription_s=0.15,
)  # fmt: skip


class Recorder(Actor):
    """Answers whatever it is asked with the same, and keeps whatever else comes."""

    role = "recorder"
    codec = CODEC

    def __init__(self):
        self.told = []
        self.calls = []
        self.publications = []
        self.resets = []
        self.follower_resets = []
        self.lost = []
        self.members = []
        self.cancelled = []

    def on_tell(self, sender, message, buffers):
        self.told.append((sender, message, [bytes(b) for b in buffers]))
        if message == Say(text="raise"):
            raise ValueError("as told")

    def on_ask(self, call):
        self.calls.append(call)
        match call.message:
            case Say(text="silence"):
                call.on_cancel(lambda: self.cancelled.append(call))
            case Say(text="raise"):
                raise ValueError("as asked")
            case Say(text="fail"):
                call.fail("no_way", "it cannot be", retryable=True, param="text")
            case _:
                call.reply(call.message, call.buffers)

    def on_publication(self, publisher, topic, sequence, message):
        self.publications.append((publisher, topic, sequence, message))

    def on_subscription_reset(self, publisher, topic):
        self.resets.append((publisher, topic))

    def on_subscriber_reset(self, subscriber, topic):
        self.follower_resets.append((subscriber, topic))

    def on_peer_lost(self, peer, reason):
        self.lost.append((peer, reason))

    def on_members(self, joined, left, changed):
        self.members.append(([str(m.address) for m in joined], [str(m.address) for m in left], changed))

    def stats(self):
        return {"mesh_told": float(len(self.told))}


async def until(condition, timeout_s=5.0):
    """Wait for something that is bound to come true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


class Mesh:
    """A registry and any number of recorders over one kind of transport."""

    def __init__(self, make_transport, kill):
        self.make_transport = make_transport
        self.kill_transport = kill
        self.systems = {}
        self.registry = None
        self.options = QUICK

    def lookup(self):
        return None if self.registry is None else (self.registry.address, self.registry.describe().endpoint)

    async def start_registry(self, epoch=1, **settings):
        actor = RegistryActor(**{"lease_s": 1.0, **settings})
        self.registry = await self.start("registry", epoch, actor)
        return self.registry

    async def start(self, actor_id, epoch=1, actor=None, options=None):
        address, transport = Address(actor_id, epoch), self.make_transport(Address(actor_id, epoch))
        system = ActorSystem(actor or Recorder(), address, transport, self, options or self.options)
        self.systems[actor_id] = system
        await system.start()
        if system.actor.joins:
            async with asyncio.timeout(5):
                await system.joined()
        return system

    async def pair(self, **settings):
        await self.start_registry()
        a, b = await self.start("a", **settings), await self.start("b", **settings)
        await until(lambda: a.registration.view.get("b") and b.registration.view.get("a"))
        return a, b

    async def kill(self, system):
        """As kill -9 would: nothing is said any more."""
        system.heartbeats.close()
        await self.kill_transport(system)
        await system.tasks.close()
        system.asking.close()
        system.serving.close()
        system.publishing.close()

    async def stop(self):
        systems = list(self.systems.values())
        for system in sorted(systems, key=lambda s: s is self.registry):
            await system.stop()


@contextlib.asynccontextmanager
async def simulated_mesh():
    network = SimulatedNetwork(seed=0)

    async def kill(system):
        network.crash(system.address)

    mesh = Mesh(network.transport, kill)
    mesh.network = network
    try:
        yield mesh
    finally:
        await mesh.stop()


@contextlib.asynccontextmanager
async def zeromq_mesh(path):
    """Over ipc sockets in `path`, which has to be short."""
    directory = RunDirectory(path)
    directory.create()
    transports = {}

    def make(address):
        transports[address] = ZeroMQTransport(ZeroMQOptions(run_directory=directory))
        return transports[address]

    async def kill(system):
        await transports[system.address].stop()

    mesh = Mesh(make, kill)
    mesh.directory = directory
    mesh.transports = transports
    try:
        yield mesh
    finally:
        await mesh.stop()
