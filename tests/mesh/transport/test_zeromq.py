"""What only real sockets show: garbage on ports, full pipes, dead listeners, redials, lent memory, tcp."""

import asyncio
import os
import resource
import socket
import stat
import sys
import threading
import time

import pytest
import zmq
from structlog.testing import capture_logs

from mesh.address import Address, Endpoint
from mesh.errors import BindError, PeerLost
from mesh.membership.view import Member, StaticBootstrap
from mesh.options import SystemOptions
from mesh.runtime.run_directory import HostRecord, RunDirectory
from mesh.system import ActorSystem
from mesh.testing.leaks import assert_no_leaks
from mesh.testing.ports import free_port
from mesh.transport import names
from mesh.transport.base import Channel, Link
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from mesh.transport.zeromq_links import FROM_NOBODY
from mesh.transport.zeromq_socket import ZERO_COPY_BYTES, Outbox
from mesh.wire.header import Limits
from tests.mesh.memory import resident_mib
from tests.mesh.mesh_under_test import QUICK, Recorder, Say, Step, until, zeromq_mesh

HI = Say(text="hi")
A, B = Address("a", 1), Address("b", 1)


class Ear:
    def __init__(self):
        self.heard = []
        self.down = []
        self.refused = []
        self.num_unknown_down = 0

    def on_frames(self, link, channel, parts):
        self.heard.append((link, channel, list(parts)))

    def link_of(self, peer=A):
        """The connection that a peer's last message came by."""
        return next(link for link, _, _ in reversed(self.heard) if link.peer == peer)

    def on_refused(self, link, refusal):
        self.refused.append((link, refusal.code))

    def on_link_down(self, link, reason):
        self.down.append((link, reason))

    def on_some_link_down(self):
        self.num_unknown_down += 1


@pytest.fixture
def start(run, short_path, once_per_process):
    """A function that starts transports; all are stopped, nothing is left. For tests that are coroutine functions."""

    def runner(test):
        async def main():
            directory = RunDirectory(short_path)
            directory.create()
            started = []

            async def start(address, /, **options):
                options = options or {"run_directory": directory}
                transport, ear = ZeroMQTransport(ZeroMQOptions(**options)), Ear()
                started.append(transport)
                return transport, ear, await transport.start(address, ear)

            try:
                await test(start)
            finally:
                for transport in started:
                    await transport.stop()
            assert list(directory.sockets.iterdir()) == []

        with assert_no_leaks(shm_prefix="none of this test", within_s=1.0):
            run(main)

    return runner


async def test_messages_go_both_ways_on_one_link(start):
    a, ear_a, _ = await start(A)
    b, ear_b, where = await start(B)
    link = a.dial(B, where)
    large = os.urandom(ZERO_COPY_BYTES * 4)
    for channel in Channel:
        assert a.send(link, channel, (b"h", b"b", memoryview(large), bytearray(b"small")))
    await until(lambda: len(ear_b.heard) == 2)
    back = ear_b.link_of(A)
    assert (back.peer, back.dialed) == (A, False)
    for heard_link, channel, parts in ear_b.heard:
        assert heard_link == back
        assert [bytes(part) for part in parts] == [b"h", b"b", large, b"small"]
        assert b.send(back, channel, (b"reply", large))
    await until(lambda: len(ear_a.heard) == 2)
    assert all(heard == link and bytes(parts[1]) == large for heard, _, parts in ear_a.heard)
    assert not b.send(Link(Address("x", 1), dialed=False), Channel.DATA, (b"",))
    assert not a.send(Link(Address("x", 1), dialed=True), Channel.DATA, (b"",))


async def test_lent_memory_is_known_until_it_is_sent(start):
    a, _, _ = await start(A)
    _, ear, where = await start(B)
    link = a.dial(B, where)
    large = bytearray(os.urandom(8 << 20))
    assert a.send(link, Channel.DATA, (b"h", memoryview(large)))
    await until(lambda: ear.heard)
    assert bytes(ear.heard[0][2][1]) == large
    # By a private name: lent memory that is not known as such any more looks the same until it is overwritten.
    await until(lambda: a._dialed[link].sockets[Channel.DATA].num_lent == 0)
    for number in range(300):
        assert a.send(link, Channel.DATA, (b"h", bytes([number % 256]) * ZERO_COPY_BYTES))
    await until(lambda: len(ear.heard) == 301)
    await until(lambda: a._dialed[link].sockets[Channel.DATA].num_lent == 0)


async def test_a_full_pipe_fills_the_outbox_and_nothing_is_lost(start, short_path):
    small = {"run_directory": RunDirectory(short_path), "high_water_mark": 10, "max_outbox_messages": 500}
    a, ear_a, _ = await start(A, **small)
    b, ear_b, where = await start(B, **small)
    link = a.dial(B, where)
    body = b"x" * 10_000
    sent = 0
    while a.send(link, Channel.DATA, (b"%d" % sent, body)):
        sent += 1
    assert 500 <= sent < 1000
    await until(lambda: len(ear_b.heard) == sent)
    assert [int(parts[0]) for _, _, parts in ear_b.heard] == list(range(sent))
    # The same the other way, where a ROUTER would drop.
    back = ear_b.link_of(A)
    sent = 0
    while b.send(back, Channel.DATA, (b"%d" % sent, body)):
        sent += 1
    assert sent >= 500
    await until(lambda: len(ear_a.heard) == sent)
    assert [int(parts[0]) for _, _, parts in ear_a.heard] == list(range(sent))


def test_outboxes_are_bounded_by_bytes_too():
    outbox = Outbox(10, 100)
    assert outbox.add((b"x" * 60, memoryview(b"y" * 30)))
    assert not outbox.add((b"x" * 20,))
    assert outbox.flush(lambda parts: True)
    assert outbox.add((b"x" * 20,))
    assert not outbox.flush(lambda parts: False)


async def test_a_dead_listener_is_a_link_that_goes_down(start, short_path):
    a, ear, _ = await start(A)
    for where in ("ipc:///nowhere/at/all", "tcp://127.0.0.1:1", "nonsense://x"):
        link = a.dial(B, Endpoint(where, where))
        await until(lambda: ear.down)
        assert ear.down.pop()[0] == link
        assert not a.send(link, Channel.DATA, (b"x",))
        await asyncio.sleep(0.02)
        assert ear.down == []


@pytest.mark.parametrize("num_left", [0, 1, 2, 3, 5, 7])
async def test_a_dial_without_descriptors_is_a_link_that_goes_down_and_can_be_dialed_again(start, num_left):
    a, ear, _ = await start(A)
    _, heard, where = await start(B)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + num_left, hard))
    try:
        link = a.dial(B, where)
        assert a.send(link, Channel.DATA, (b"lost",)), "it waits, as for any link that is not up yet"
        await until(lambda: ear.down)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ((gone, reason),) = ear.down
    assert gone == link
    assert "cannot be dialed" in reason
    a.send(a.dial(B, where), Channel.DATA, (b"again",))
    # A channel that was connected before descriptors ran out is gone in the middle of its handshake: a stranger.
    await until(lambda: [b"again"] in [parts for _, _, parts in heard.heard])
    assert [b"lost"] not in [parts for _, _, parts in heard.heard]


async def test_there_are_sockets_for_as_many_peers_as_may_be_linked(start):
    peers = [await start(Address(f"b{number}", 1)) for number in range(3)]
    a, ear, _ = await start(A, bind="127.0.0.1", max_peers=3)
    links = [a.dial(Address(f"b{number}", 1), where) for number, (_, _, where) in enumerate(peers)]
    for link in links:
        assert a.send(link, Channel.DATA, (b"hi",))
    await until(lambda: all(heard.heard for _, heard, _ in peers))
    assert ear.down == []
    assert ZeroMQOptions().max_peers >= SystemOptions().max_peers


async def test_who_stops_is_seen_and_what_was_sent_before_arrives(start):
    a, ear_a, _ = await start(A)
    b, ear_b, where = await start(B)
    link = a.dial(B, where)
    a.send(link, Channel.CONTROL, (b"h", b""))
    await until(lambda: ear_b.heard)
    for number in range(100):
        b.send(ear_b.link_of(A), Channel.CONTROL, (b"%d" % number, b"x" * 100))
    await b.stop()
    await until(lambda: ear_a.down)
    assert ear_a.down == [(link, "disconnected")]
    assert len(ear_a.heard) == 100


async def test_a_listener_that_raises_misses_one_message_only(start):
    a, _, _ = await start(A)
    _, ear, where = await start(B)
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    heard = ear.on_frames

    def on_frames(link, channel, parts):
        heard(link, channel, parts)
        if len(ear.heard) % 10 == 1:
            raise ValueError("a bug")

    ear.on_frames = on_frames
    link = a.dial(B, where)
    for _ in range(100):
        a.send(link, Channel.DATA, (b"h", b"b"))
    await until(lambda: len(ear.heard) == 100)
    assert len(raised) == 10


async def test_a_redial_is_another_link(start):
    a, ear_a, _ = await start(A)
    b, ear_b, where = await start(B)
    for number in range(5):
        link = a.dial(B, where)
        a.send(link, Channel.DATA, (b"%d" % number, b""))
        await until(lambda n=number: len(ear_b.heard) == n + 1)
        b.send(ear_b.link_of(A), Channel.DATA, (b"%d" % number, b""))
        await until(lambda n=number: len(ear_a.heard) == n + 1)
        a.close_link(link)
    assert ear_a.down == []
    assert len({link for link, _, _ in ear_b.heard}) == 5


async def test_an_accepted_peer_that_is_gone_is_a_link_that_goes_down(start):
    a, _, _ = await start(A)
    b, ear, where = await start(B)
    link = a.dial(B, where)
    a.send(link, Channel.DATA, (b"h", b""))
    await until(lambda: ear.heard)
    a.close_link(link)
    back = ear.link_of(A)

    def tried():
        b.send(back, Channel.DATA, (b"x", b""))
        return ear.down

    await until(tried)
    assert ear.down == [(back, "it closed its connection")]
    b.close_link(back)


async def test_what_an_accepted_peer_sent_before_it_stopped_arrives_before_its_end(start):
    a, _, _ = await start(A)
    b, ear, where = await start(B)
    order = []
    link = a.dial(B, where)
    a.send(link, Channel.DATA, (b"h", b""))
    await until(lambda: ear.heard)
    back = ear.link_of(A)
    ear.on_frames = lambda link, channel, parts: order.append(channel)
    ear.on_link_down = lambda link, reason: order.append(reason)
    for _ in range(300):
        a.send(link, Channel.DATA, (b"h", b"last words"))
    await a.stop()
    # Blocking, so that nothing of all that is read before what is sent there is refused.
    for _ in range(100):
        b.send(back, Channel.DATA, (b"x", b""))
        time.sleep(0.001)  # noqa: ASYNC251
    assert order == []
    await until(lambda: not b.send(back, Channel.DATA, (b"x", b"")))
    assert order == [Channel.DATA] * 300 + ["it closed its connection"]


async def test_nobody_takes_a_connection_over_without_its_nonce(start):
    a, ear_a, _ = await start(A)
    b, ear_b, where = await start(B)
    a.send(a.dial(B, where), Channel.DATA, (b"h", b""))
    await until(lambda: ear_b.heard)
    back = ear_b.link_of(A)
    with zmq.Context() as context, context.socket(zmq.DEALER) as thief, context.socket(zmq.DEALER) as other:
        for socket, claimed in ((thief, str(A).encode()), (other, b"%s#%s" % (str(A).encode(), b"0" * 16))):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, claimed)
            socket.connect(where.data)
            socket.send_multipart([b"stolen", b""])
        await until(lambda: len(ear_b.heard) == 3)
        for _ in range(50):
            assert b.send(back, Channel.DATA, (b"secret", b""))
        await until(lambda: len(ear_a.heard) == 50)
        assert not thief.poll(0)
        assert not other.poll(0)
    # Who leaves the nonce out is nobody; with another one it is another connection, for the links to judge.
    assert [link.nonce for link, _, _ in ear_b.heard][1:] in (["", "0" * 16], ["0" * 16, ""])
    assert ear_b.down == []


CLAIMS = """
import sys, zmq
sockets = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(30)]
for socket in sockets:
    socket.setsockopt(zmq.RECONNECT_IVL, 86_400_000)
    socket.setsockopt(zmq.ROUTING_ID, b"z#1#0123456789abcdef")
    socket.connect(sys.argv[1])
    for _ in range(900):
        socket.send_multipart([b"h", b"x" * 8000])
zmq.Context.instance().destroy(linger=500)
"""


async def test_connections_that_claim_one_routing_id_do_not_fill_the_memory(start):
    _, ear, where = await start(B)
    before = resident_mib()
    claimant = await asyncio.create_subprocess_exec(sys.executable, "-c", CLAIMS, where.data)
    claiming = asyncio.ensure_future(claimant.wait())
    most = 0
    while not claiming.done():
        await asyncio.wait([claiming], timeout=0.05)
        most = max(most, resident_mib() - before)
        ear.heard.clear()
    assert claimant.returncode == 0
    # They have sent 206, and libzmq would keep nearly all of it.
    assert most < 64


async def test_names_that_are_no_addresses_are_nobody(start):
    _, ear, where = await start(B)
    with zmq.Context() as context:
        sockets = []
        nonce = b"n" * 16
        no_addresses = (b"", b"no-epoch", b"x#y", b"\xff\xfe#1", b"a# 1", b"a#01", b"#1", b"a#1#m")
        names = (*(b"%s#%s" % (one, nonce) for one in no_addresses), b"", b"a#1", b"a#1#n", b"a#1#" + b"n" * 65)
        for identity in names:
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, 0)
            if identity:
                stranger.setsockopt(zmq.ROUTING_ID, identity)
            stranger.connect(where.data)
            stranger.send_multipart([b"h", b"b"])
            sockets.append(stranger)
        await until(lambda: len(ear.heard) == len(names))
        assert {link for link, _, _ in ear.heard} == {FROM_NOBODY}
        for stranger in sockets:
            stranger.close()


async def test_epochs_bind_their_own_sockets_and_never_twice(start):
    await start(A)
    with pytest.raises(BindError, match="new epoch"):
        await start(A)
    _, _, where = await start(Address("a", 2))
    assert where.control.endswith("/s/a.2.c")
    path = where.control.removeprefix("ipc://")
    assert stat.S_ISSOCK(os.stat(path).st_mode)


async def test_tcp_listens_on_a_free_port_of_the_loopback_interface(start):
    a, _, _ = await start(A, bind="127.0.0.1")
    _, ear, where = await start(B, bind="localhost")
    assert where.control.startswith("tcp://127.0.0.1:")
    assert where.control != where.data
    link = a.dial(B, where)
    a.send(link, Channel.DATA, (b"h", b"over tcp"))
    await until(lambda: ear.heard)
    assert ear.heard[0][2][1] == b"over tcp"


async def test_ports_that_a_firewall_knows(start, short_path):
    directory, first = RunDirectory(short_path), free_port()
    ports = (first, first + 4)
    directory.write_host(HostRecord("d", "127.0.0.4", "d.example", ports=ports))
    options = vars(ZeroMQOptions.of_host(directory))
    taken: list[int] = []
    for peer in (A, B):
        _, _, where = await start(peer, **options)
        taken += [int(one.rpartition(":")[2]) for one in (where.control, where.data)]
    assert taken == sorted(set(taken))
    assert first <= taken[0]
    assert taken[-1] <= first + 4
    with pytest.raises(BindError, match="two others for a moment"):
        await start(Address("c", 1), **options)


async def test_one_actor_listens_for_its_host_and_for_others(start, short_path):
    directory = RunDirectory(short_path)
    directory.write_host(HostRecord("d", "127.0.0.2", "127.0.0.2"))
    port = free_port()
    options = ZeroMQOptions.of_host(directory, port)
    b, ear, where = await start(B, **vars(options))
    assert where == Endpoint(
        f"tcp://127.0.0.2:{port}",
        f"tcp://127.0.0.2:{port + 1}",
        f"ipc://{short_path}/s/b.1.c",
        f"ipc://{short_path}/s/b.1.d",
    )
    near, ear_near, _ = await start(A)
    far, ear_far, _ = await start(Address("c", 1), bind="127.0.0.3")
    for transport, to in ((near, where.on_its_host), (far, where)):
        link = transport.dial(B, to)
        for channel in Channel:
            transport.send(link, channel, (b"h", b"b"))
    await until(lambda: len(ear.heard) == 4)
    for peer in (A, Address("c", 1)):
        assert b.send(ear.link_of(peer), Channel.DATA, (b"h", b"back"))
    await until(lambda: ear_near.heard and ear_far.heard)
    near.close_link(Link(B, dialed=True))
    far.close_link(Link(B, dialed=True))
    await until(lambda: ear.num_unknown_down == len(Channel))
    with pytest.raises(BindError, match="use another port"):
        await start(Address("registry", 9), **vars(options))
    directory.write_host(None)
    assert ZeroMQOptions.of_host(directory) == ZeroMQOptions(run_directory=directory)


async def test_ipv6_is_listened_on_and_dialed(start):
    a, _, _ = await start(A, bind="::1")
    _, ear, where = await start(B, bind="::", insecure=True, address="::1")
    assert where.control.startswith("tcp://[::1]:")
    v4 = Endpoint(*(at.replace("[::1]", "127.0.0.1") for at in (where.control, where.data)))
    for number, (address, to) in enumerate(((B, where), (Address("b", 2), v4))):
        a.send(a.dial(address, to), Channel.DATA, (b"h", b"b"))
        await until(lambda n=number: len(ear.heard) > n)


async def test_a_name_that_is_looked_up_holds_up_nobody_else(start, monkeypatch):
    """The name server of a container network takes seconds to say that a container is gone."""
    is_answered, asked = threading.Event(), []

    def getaddrinfo(name, *_, **__):
        asked.append(name)
        if name == "gone.example":
            assert is_answered.wait(20)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        entries = [(socket.AF_INET6, ("fd00::7", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
        return [(family, socket.SOCK_STREAM, 6, "", where) for family, where in entries]

    monkeypatch.setattr(names.socket, "getaddrinfo", getaddrinfo)
    a, ear_a, _ = await start(A)
    _, ear_b, where = await start(B, bind="127.0.0.1", address="b.example")
    assert where.control.startswith("tcp://b.example:")
    gone = Endpoint("tcp://gone.example:1", "tcp://gone.example:2")
    dialed = [a.dial(Address("x", epoch), gone) for epoch in (1, 2, 3)]
    link = a.dial(B, where)
    for number in range(3):
        assert a.send(link, Channel.DATA, (b"h", b"%d" % number)), "kept until the address is known"
    await until(lambda: len(ear_b.heard) == 3)
    assert [bytes(parts[1]) for _, _, parts in ear_b.heard] == [b"0", b"1", b"2"]
    assert ear_a.down == []
    assert a.send(dialed[0], Channel.DATA, (b"h", b"lost"))
    a.close_link(dialed[2])
    is_answered.set()
    await until(lambda: len(ear_a.down) == 2)
    assert [link for link, _ in ear_a.down] == dialed[:2]
    assert "gone.example cannot be looked up" in ear_a.down[0][1]
    assert asked == ["gone.example", "b.example"], "one look-up of a name at a time"


async def test_of_a_names_addresses_the_next_one_is_dialed_where_nobody_answered(start, monkeypatch):
    def getaddrinfo(*_, **__):
        where = [(socket.AF_INET, ("127.0.0.9", 0)), (socket.AF_INET6, ("::1", 0, 0, 0)),
                 (socket.AF_INET, ("127.0.0.1", 0))]  # fmt: skip
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in where]

    monkeypatch.setattr(names.socket, "getaddrinfo", getaddrinfo)
    a, ear_a, _ = await start(A)
    _, ear_b, where = await start(B, bind="::1", address="b.example")
    for number in range(3):
        # Of the two addresses where nobody listens a dial each, and of the third all that follow.
        while not ear_b.heard[number:]:
            link, num_down = a.dial(B, where), len(ear_a.down)
            a.send(link, Channel.DATA, (b"h", b"%d" % number))
            await until(lambda n=number, down=num_down: ear_b.heard[n:] or len(ear_a.down) > down)
        a.close_link(link)
    assert [link.peer for link, _ in ear_a.down] == [B, B]


async def test_tcp_beyond_the_host_has_to_be_wanted(start):
    for host in ("0.0.0.0", "10.1.2.3", "example.org", "::"):
        with pytest.raises(BindError, match="insecure"):
            await start(A, bind=host)
    _, _, where = await start(A, bind="0.0.0.0", insecure=True, address="worker.example")
    assert where.control.startswith("tcp://worker.example:")
    with pytest.raises(BindError, match="cannot be listened on"):
        await start(B, bind="203.0.113.7", insecure=True)
    _, _, where = await start(A, bind="::", insecure=True, address="fd00::7")
    assert where.data.startswith("tcp://[fd00::7]:")
    with pytest.raises(BindError, match="too long"):
        await start(Address("x" * 300, 1), bind="127.0.0.1")


def test_garbage_on_a_port_is_refused_and_the_actor_goes_on(run, once_per_process):
    async def main():
        transport = ZeroMQTransport(ZeroMQOptions(bind="127.0.0.1", handshake_timeout_s=0.2))
        nowhere = StaticBootstrap(Address("registry", 1), Endpoint("tcp://127.0.0.1:1", "tcp://127.0.0.1:1"))
        actor = Recorder()
        actor.joins = False
        system = ActorSystem(actor, B, transport, nowhere, QUICK)
        await system.start()
        where = system.describe().endpoint
        port = int(where.data.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        for garbage in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
            os.urandom(4096),
            b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(60) + os.urandom(500),
            b"",
        ):
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.setblocking(False)
            await loop.sock_sendall(stranger, garbage)
            await asyncio.sleep(0.05)
            stranger.close()
        await until(lambda: system.metrics.value("mesh_frames_refused_total", code="no_handshake") >= 2)
        other = ZeroMQTransport(ZeroMQOptions(bind="127.0.0.1"))
        asker = ActorSystem(Recorder(), A, other, nowhere, QUICK)
        asker.actor.joins = False
        asker.registration.view.reset(1, 1, [Member(actor_id="b", role="r", epoch=1, endpoint=where)])
        await asker.start()
        assert (await asker.actor.ctx.ask("b", HI, timeout_s=5)).message == HI
        await asker.stop()
        await system.stop()

    with capture_logs() as logs:
        run(main)
    assert [one["log_level"] for one in logs if one.get("code") == "no_handshake"] == ["info"], "once, and no warning"


async def test_a_frame_over_the_limit_ends_the_connection_not_the_actor(start, short_path):
    limits = Limits(max_message_bytes=100_000)
    _, ear, where = await start(B, run_directory=RunDirectory(short_path), limits=limits)
    a, ear_a, _ = await start(A)
    link = a.dial(B, where)
    a.send(link, Channel.DATA, (b"h", bytes(200_000)))
    await until(lambda: ear_a.down)
    assert ear.heard == []
    link = a.dial(B, where)
    a.send(link, Channel.DATA, (b"h", bytes(50_000)))
    await until(lambda: ear.heard)


def test_no_welcome_from_a_mute_listener(run, short_path, once_per_process):
    async def main():
        async with zeromq_mesh(short_path) as mesh:
            await mesh.start_registry()
            a = await mesh.start("a")
            mute = socket.socket(socket.AF_UNIX)
            path = short_path / "mute"
            mute.bind(str(path))
            mute.listen(4)
            where = Endpoint(f"ipc://{path}", f"ipc://{path}")
            view, b = a.registration.view, Member(actor_id="b", role="r", epoch=1, endpoint=where)
            assert view.apply(view.registry_epoch, view.version + 1, [b], [])
            with pytest.raises(PeerLost, match="no welcome"):
                await a.actor.ctx.ask("b", HI, timeout_s=60)
            mute.close()

    run(main)


def test_a_burst_in_both_directions_arrives_whole(run, short_path, once_per_process):
    """Sends consume the events that announce arrivals; none may be overlooked."""

    async def main():
        async with zeromq_mesh(short_path) as mesh:
            a, b = await mesh.pair()
            for system in (a, b):
                actor = system.actor
                actor.on_tell = lambda sender, message, buffers, actor=actor: (
                    actor.told.append(message.step),
                    message.step % 3 or actor.ctx.tell(sender.actor_id, Step(step=-1)),
                )
            for burst in range(20):
                for number in range(burst * 50, burst * 50 + 50):
                    assert a.actor.ctx.tell("b", Step(step=number + 1))
                    assert b.actor.ctx.tell("a", Step(step=number + 1))
                await asyncio.sleep(0.001 * (burst % 3))
            await until(lambda: all(len(s.actor.told) == 1000 + 333 for s in (a, b)))
            for system in (a, b):
                assert [step for step in system.actor.told if step > 0] == list(range(1, 1001))

    run(main)
