"""Frames that nobody should send, at a port with keys and at one without: the actor goes on, and does not grow.

Those at the port with keys come from a host that is allowed, since nobody else gets as far as to send one.
"""

import asyncio
import contextlib
import random

import pytest
import zmq
from structlog.testing import capture_logs

from mesh.errors import CallError
from mesh.membership.view import Member
from mesh.wire.frames import SYSTEM_CODEC, Heartbeat, Hello
from mesh.wire.header import Header, Verb, encode_header
from tests.mesh.memory import resident_mib
from tests.mesh.mesh_under_test import CODEC, Count, Recorder, Say
from tests.mesh.two_hosts import TwoHosts

HI = Say(text="hi")
NUM_SOCKETS = 8
FRAMES_PER_SOCKET = 500
SOME_FRAMES, ALL_FRAMES = 5_000, 1_000_000
MAX_GROWTH_MIB = 32
MAX_LINKS = 32


class Alone(Recorder):
    """Answers without a registry, and keeps nothing: what is measured is the mesh."""

    joins = False

    def on_tell(self, sender, message, buffers):
        pass

    def on_ask(self, call):
        call.reply(HI)


class Fuzzer:
    """Draws frames: most are some valid one, in which something is wrong."""

    def __init__(self, seed, endpoint):
        self.random = random.Random(seed)
        self.endpoint = endpoint
        self.used = []

    def identity(self):
        """A routing id: one that nobody has had, or one that is in use, most often."""
        draw = self.random
        if self.used and draw.randrange(4) == 0:
            return draw.choice(self.used)
        self.used = [*self.used[-NUM_SOCKETS:], self.new_identity()]
        return self.used[-1]

    def new_identity(self):
        draw = self.random
        match draw.randrange(4):
            case 0:
                return bytes([draw.randrange(1, 256), *draw.randbytes(draw.randrange(9, 40))])
            case 1:
                name = draw.choice([b"x.head", b"registry", b"y.head", b"z.d", b""])
                return b"%s#%d#%s" % (name, draw.randrange(-1, 3), draw.randbytes(8).hex().encode())
            case _:
                return b"z%d.d#%d#%s" % (draw.randrange(4), draw.randrange(1, 4), draw.randbytes(8).hex().encode())

    def body(self, sender, epoch):
        draw = self.random
        match draw.randrange(5):
            case 0:
                member = Member(sender, "recorder", epoch, self.endpoint, host=draw.choice(["d", "head", ""]))
                return SYSTEM_CODEC.encode(Hello(draw.randrange(5), draw.randrange(5), member))
            case 1:
                return SYSTEM_CODEC.encode(Heartbeat(version=draw.randrange(9)))
            case 2:
                return CODEC.encode(draw.choice([HI, Count(to=3)]))
            case 3:
                return draw.randbytes(draw.choice([0, 1, 60, 600]))
            case _:
                return bytes([0x91 + draw.randrange(15)]) * draw.randrange(1, 500)

    def header(self, sender, epoch):
        draw = self.random
        number = draw.choice([0, 1, draw.randrange(1 << 20), (1 << 63) - 1, -1])
        return encode_header(
            Header(
                draw.choice([0, 2, 3, 3, 3, 3, 255]),
                draw.choice([*Verb, Verb.HELLO, Verb.HELLO, 0, 17]),
                draw.randrange(1 << 16),
                number,
                draw.randrange(8),
                sender,
                epoch,
                draw.choice([0, 1, 1, 1, 2]),
                draw.choice([0, 1000, 1 << 62]),
                draw.randrange(4),
                number,
                "x" * draw.choice([0, 0, 55, 5000]),
            )
        )

    def message(self, identity):
        """Parts of one, by who has (or claims) this routing id."""
        draw = self.random
        if draw.randrange(8) == 0:
            return [draw.randbytes(draw.randrange(200)) for _ in range(draw.choice([1, 2, 3, 70]))]
        name, _, rest = identity.decode(errors="replace").partition("#")
        sender = name if draw.randrange(8) else draw.choice(["x.head", "registry", "", "z\0.d", "z" * 300])
        epoch = int(rest[:1]) if rest[:1].isdigit() else 1
        parts = [self.header(sender, epoch), self.body(sender, epoch), *[b"buffer"] * draw.choice([0, 0, 0, 3])]
        if draw.randrange(3) == 0:
            which = draw.randrange(2)
            damaged = bytearray(parts[which])
            if damaged and draw.randrange(2):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            else:
                del damaged[draw.randrange(len(damaged) + 1) :]
            parts[which] = bytes(damaged)
        return parts


async def storm(fuzzer, context, dress, num_frames):
    """Send so many by sockets that come and go; what is answered is thrown away."""
    for start in range(0, num_frames, NUM_SOCKETS * FRAMES_PER_SOCKET):
        sockets = []
        for which in range(NUM_SOCKETS):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            identity = fuzzer.identity()[:255]
            socket.setsockopt(zmq.ROUTING_ID, identity)
            dress(socket)
            socket.connect(fuzzer.endpoint.data if which % 2 else fuzzer.endpoint.control)
            sockets.append((socket, identity))
        left = min(num_frames - start, NUM_SOCKETS * FRAMES_PER_SOCKET)
        for number in range(left):
            socket, identity = sockets[number % NUM_SOCKETS]
            parts = fuzzer.message(identity)
            # One that has lost its routing id to another takes no more in the end: the others go on.
            for _ in range(200):
                try:
                    socket.send_multipart(parts, zmq.NOBLOCK)
                    break
                except zmq.Again:
                    await asyncio.sleep(0.001)
            if number % 64 == 0:
                await asyncio.sleep(0)
                drain(sockets)
        drain(sockets)
        for socket, _ in sockets:
            socket.close(0)


def drain(sockets):
    for socket, _ in sockets:
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            socket.recv_multipart(zmq.NOBLOCK)


async def ask(system):
    # A connection to a stranger that ends has others asked whether they are there, who may be late among the frames.
    for _ in range(20):
        try:
            return (await system.actor.ctx.ask("x.head", HI, timeout_s=2)).message
        except CallError:
            await asyncio.sleep(0.05)
    raise AssertionError("it answers nobody any more")


async def fuzz(path, *, keys, num_frames):
    hosts = TwoHosts(path, keys=keys)
    x, y = await hosts.start("x.head", Alone(), "head"), await hosts.start("y.d", Alone(), "d")
    for system, other in ((x, y), (y, x)):
        system.registration.view.reset(1, 1, [other.describe()])
    endpoint = x.describe().endpoint

    def dress(socket):
        if keys:
            socket.setsockopt(zmq.CURVE_SERVERKEY, hosts.pairs["head"].public_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, hosts.pairs["d"].public_key.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, hosts.pairs["d"].secret_key.encode())

    async with contextlib.AsyncExitStack() as stack:
        for system in (x, y):
            stack.push_async_callback(system.stop)
        logs = stack.enter_context(capture_logs())
        context = stack.enter_context(zmq.Context())
        # Also where an assertion fails: a context waits for its sockets.
        stack.callback(context.destroy, 0)
        fuzzer = Fuzzer(14, endpoint)
        await storm(fuzzer, context, dress, num_frames // 5)
        assert await ask(y) == HI
        before = resident_mib()
        await storm(fuzzer, context, dress, num_frames - num_frames // 5)
        grown = resident_mib() - before
        assert await ask(y) == HI
        counters = x.stats().counters
        links = len(x._transport._accepted), len(list(x.links.peers()))
    refused = sum(value for series, value in counters.items() if series.startswith("mesh_frames_refused"))
    # Of the others a few are valid by chance, and what a socket still had goes when another takes its routing id.
    assert refused > num_frames / 2
    assert grown < MAX_GROWTH_MIB
    assert max(links) <= MAX_LINKS
    said = [(entry["event"], entry.get("peer"), entry.get("code")) for entry in logs if entry["log_level"] == "warning"]
    assert len(said) == len(set(said))
    assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")]


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "curve"])
@pytest.mark.parametrize(
    "num_frames", [SOME_FRAMES, pytest.param(ALL_FRAMES, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_fuzzed_frames_are_refused_and_the_actor_goes_on(run, short_path, once_per_process, keys, num_frames):
    run(lambda: fuzz(short_path, keys=keys, num_frames=num_frames))
