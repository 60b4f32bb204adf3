"""Frames and bytes that nobody should send, at a port with keys and at one without: the actor goes on, and is as large.

Frames at the port with keys come from a host that is allowed, since nobody else gets as far as to send one; bytes, and
handshakes that lead to nothing, from anybody.
"""

import asyncio
import contextlib
import os
import random

import pytest
import zmq
from structlog.testing import capture_logs

from mesh.errors import CallError
from mesh.membership.view import Member
from mesh.wire.frames import SYSTEM_CODEC, Heartbeat, Hello
from mesh.wire.header import PROTOCOL_VERSION, Header, Verb, encode_header
from tests.mesh.memory import resident_mib
from tests.mesh.mesh_under_test import CODEC, Number, Recorder, Say
from tests.mesh.two_hosts import TwoHosts

HI = Say(text="hi")
NUM_SOCKETS = 8
FRAMES_PER_SOCKET = 500
SOME_FRAMES, ALL_FRAMES = 5_000, 1_000_000
SOME_CALLERS, ALL_CALLERS = 160, 8_000
AT_ONCE = 40
MAX_GROWTH_MIB = 32
MAX_LINKS = 32
HANDSHAKE_ENDS = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


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
                return SYSTEM_CODEC.encode(Hello(draw.randrange(6), draw.randrange(6), member))
            case 1:
                return SYSTEM_CODEC.encode(Heartbeat(version=draw.randrange(9)))
            case 2:
                return CODEC.encode(draw.choice([HI, Number(value=3)]))
            case 3:
                return draw.randbytes(draw.choice([0, 1, 60, 600]))
            case _:
                return bytes([0x91 + draw.randrange(15)]) * draw.randrange(1, 500)

    def header(self, sender, epoch):
        draw = self.random
        number = draw.choice([0, 1, draw.randrange(1 << 20), (1 << 63) - 1, -1])
        return encode_header(
            Header(
                draw.choice([0, PROTOCOL_VERSION - 1, *[PROTOCOL_VERSION] * 4, 255]),
                draw.choice([*Verb, Verb.HELLO, Verb.HELLO, 0, 7, 17]),
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


@contextlib.asynccontextmanager
async def fuzzed(hosts, seed):
    """Actors of two hosts that know each other, who fuzzes the first of them, a context, and what is logged."""
    x, y = await hosts.start("x.head", Alone(), "head"), await hosts.start("y.d", Alone(), "d")
    for system, other in ((x, y), (y, x)):
        system.registration.view.reset(1, 1, [other.describe()])
    async with contextlib.AsyncExitStack() as stack:
        for system in (x, y):
            stack.push_async_callback(system.stop)
        logs = stack.enter_context(capture_logs())
        context = stack.enter_context(zmq.Context())
        # Also where an assertion fails: a context waits for its sockets.
        stack.callback(context.destroy, 0)
        yield x, y, Fuzzer(seed, x.describe().endpoint), context, logs
    assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")]


async def fuzz(path, *, keys, num_frames):
    hosts = TwoHosts(path, keys=keys)

    def dress(socket):
        if keys:
            socket.setsockopt(zmq.CURVE_SERVERKEY, hosts.pairs["head"].public_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, hosts.pairs["d"].public_key.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, hosts.pairs["d"].secret_key.encode())

    async with fuzzed(hosts, 14) as (x, y, fuzzer, context, logs):
        await storm(fuzzer, context, dress, num_frames // 5)
        assert await ask(y) == HI
        before = resident_mib()
        await storm(fuzzer, context, dress, num_frames - num_frames // 5)
        grown = resident_mib() - before
        assert await ask(y) == HI
        counters = x.stats().counters
        links = len(hosts.transports["x.head"].accepted), len(list(x.links.peers()))
    refused = sum(value for series, value in counters.items() if series.startswith("mesh_frames_refused"))
    # Of the others a few are valid by chance, and what a socket still had goes when another takes its routing id.
    assert refused > num_frames / 2
    assert grown < MAX_GROWTH_MIB
    assert max(links) <= MAX_LINKS
    said = [(entry["event"], entry.get("peer"), entry.get("code")) for entry in logs if entry["log_level"] == "warning"]
    assert len(said) == len(set(said))


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""How ZMTP 3.1 begins; the mechanism in 20 bytes, who is the server, and 31 bytes of nothing follow."""


def noise(draw):
    """Bytes of somebody who speaks something else, or ZMTP up to some point."""
    mechanism = draw.choice([b"CURVE", b"CURVE", b"NULL", b"PLAIN", draw.randbytes(20)])
    greeting = GREETING + mechanism.ljust(20, b"\0") + bytes([draw.randrange(2)]) + bytes(31)
    hello = b"\x05HELLO" + draw.choice([b"\x01\x00", draw.randbytes(2)]) + draw.randbytes(192)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    command = draw.choice([hello, hello[: draw.randrange(200)], ready, draw.randbytes(draw.randrange(300))])
    # A long one says how long it is in eight bytes: as much as nobody has.
    framed = draw.choice([b"\x04%c" % (len(command) & 255), b"\x06" + b"\x7f" * draw.choice([1, 8])]) + command
    return draw.choice(
        [
            draw.randbytes(draw.randrange(1, 2000)),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            greeting[: draw.randrange(1, 64)],
            greeting + framed,
            greeting + framed + draw.randbytes(draw.randrange(5000)),
        ]
    )


async def shout(draw, where):
    """Connect, say something in pieces, and hang up, or wait until the other end does."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, int(port))
        said, cut = noise(draw), draw.randrange(1, 64)
        try:
            for piece in (said[:cut], said[cut:]):
                writer.write(piece)
                await writer.drain()
            if draw.randrange(4):
                # At the latest it ends a handshake that does not get on.
                async with asyncio.timeout(10):
                    while await reader.read(4096):
                        pass
        finally:
            writer.close()


async def dial(draw, context, where, server_key):
    """As ZeroMQ does: without keys, by a pair that nobody knows, or to another listener than is there."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, b"z.d#1#%s" % draw.randbytes(8).hex().encode())
        public, secret = zmq.curve_keypair()
        if kind := draw.randrange(3):
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key if kind == 1 else public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        monitor = socket.get_monitor_socket(zmq.Event.DISCONNECTED | HANDSHAKE_ENDS)
        socket.connect(where)
        # Whom the listener's side of the handshake refuses meanwhile has nowhere to put the rest.
        with contextlib.suppress(zmq.Again):
            for _ in range(20):
                socket.send_multipart([b"h", b"b" * 100], zmq.NOBLOCK)
        for _ in range(200):
            if monitor.poll(0):
                break
            await asyncio.sleep(0.005)
        socket.disable_monitor()
        monitor.close(0)


async def call(fuzzer, context, server_key, num_callers):
    """So many, some at once; whatever they are told, they are not heard."""
    draw = fuzzer.random
    for _ in range(num_callers // AT_ONCE):
        places = [draw.choice([fuzzer.endpoint.control, fuzzer.endpoint.data]) for _ in range(AT_ONCE)]
        shouting = [shout(draw, where) for where in places[AT_ONCE // 4 :]]
        await asyncio.gather(*shouting, *[dial(draw, context, where, server_key) for where in places[: AT_ONCE // 4]])


async def fuzz_handshakes(path, *, num_callers):
    hosts = TwoHosts(path, keys=True)
    async with fuzzed(hosts, 15) as (x, y, fuzzer, context, _):
        server_key = hosts.pairs["head"].public_key.encode()
        await call(fuzzer, context, server_key, num_callers // 4)
        assert await ask(y) == HI
        before, descriptors = resident_mib(), num_descriptors()
        await call(fuzzer, context, server_key, num_callers - num_callers // 4)
        assert await ask(y) == HI
        grown = resident_mib() - before
        more = num_descriptors() - descriptors
        counters = x.stats().counters
        strangers = [link for link in hosts.transports["x.head"].accepted if link.peer.actor_id != "y.d"]
    refused = {
        series.split('"')[1]: n for series, n in counters.items() if n and series.startswith("mesh_frames_refused")
    }
    assert sum(refused.values()) > num_callers / 2
    # No frame of theirs was looked at, not even to be refused for whose it is.
    assert set(refused) == {"bad_header", "no_handshake", "unknown_key"}
    assert grown < MAX_GROWTH_MIB
    assert more < AT_ONCE
    assert not strangers


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "num_callers", [SOME_CALLERS, pytest.param(ALL_CALLERS, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_bytes_and_handshakes_of_anybody_lead_to_nothing(run, short_path, once_per_process, num_callers):
    run(lambda: fuzz_handshakes(short_path, num_callers=num_callers))


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "curve"])
@pytest.mark.parametrize(
    "num_frames", [SOME_FRAMES, pytest.param(ALL_FRAMES, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_fuzzed_frames_are_refused_and_the_actor_goes_on(run, short_path, once_per_process, keys, num_frames):
    run(lambda: fuzz(short_path, keys=keys, num_frames=num_frames))
