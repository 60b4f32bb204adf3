"""Pairs over real sockets of this host: bytes, strangers, garbage, aborts and deaths."""

import contextlib
import errno
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvstore.errors import DeviceUnavailable, TransferError
from kvstore.pool.cuda.memory import HostBuffer
from kvstore.pool.device import CPU, DevicePages
from kvstore.transfer.paired.link import Broken, LinkMaker, Memory, Moved, PairLink, Ready, Stopped
from kvstore.transfer.paired.tcp import listener as tcp_listener
from kvstore.transfer.paired.tcp.link import TcpLinks, TcpSettings
from kvstore.transfer.paired.tcp.wire import (
    MIN_CHUNK_BYTES,
    Rendezvous,
    answer_to,
    decode_rendezvous,
    encode_header,
    encode_hello,
    encode_rendezvous,
    num_bytes_of,
    shares,
)
from tests.kvstore.fake_devices import FakeCards, FakeDeviceMemory
from tests.kvstore.transfer.paired.links import broken, until, wait_for

SIZE = 600_000
SETTINGS = TcpSettings(num_streams=3, chunk_bytes=MIN_CHUNK_BYTES)


def no_devices() -> FakeDeviceMemory:
    raise DeviceUnavailable("no device in this test")


class Ends:
    """Both ends of a pair in this process, each with memory of its own kind."""

    def __init__(self, kinds: str = "host host", settings: TcpSettings = SETTINGS) -> None:
        self.cards = FakeCards(num_bytes=1 << 22)
        self.memories = [FakeDeviceMemory(self.cards) for _ in range(2)]
        self.makers = [TcpLinks(settings, self._loader(rank)) for rank in range(2)]
        self.pages: list[Memory] = []
        self.bytes: list[memoryview] = []
        devices: list[str] = []
        for rank, kind in enumerate(kinds.split()):
            if kind == "host":
                memory = memoryview(bytearray(SIZE))
                self.pages.append(memory)
                self.bytes.append(memory)
            else:
                pointer = self.memories[rank].allocate(0, SIZE)
                self.pages.append(DevicePages(0, pointer, SIZE))
                self.bytes.append(self.memories[rank].view(pointer))
            devices.append(CPU if kind == "host" else "cuda:0")
        self.bytes[1][:] = random.Random(1).randbytes(SIZE)
        self.rendezvous = self.makers[0].unique_id()
        self.links = [
            maker.link(device, self.rendezvous, rank)
            for rank, (maker, device) in enumerate(zip(self.makers, devices, strict=True))
        ]

    def _loader(self, rank: int) -> Callable[[], FakeDeviceMemory]:
        return lambda: self.memories[rank]

    def meet(self) -> "Ends":
        for link in self.links:
            link.begin()
        for link in self.links:
            assert until(link, bool) == [Ready()]
        return self

    def move(self, number: int, targets: list[tuple[int, int]], sources: list[tuple[int, int]]) -> None:
        self.links[0].move(number, self.pages[0], targets)
        self.links[1].move(number, self.pages[1], sources)

    def moved(self, number: int) -> None:
        for link in self.links:
            assert until(link, bool) == [Moved(number)]

    def close(self) -> None:
        for link in self.links:
            link.stop()
        for maker in self.makers:
            maker.close()


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """In host memory, or where `over` says."""
    ends = Ends(getattr(request, "param", "host host"))
    yield ends
    ends.close()


def over(*kinds: str) -> pytest.MarkDecorator:
    """Kinds of memory of both ends, instead of host memory."""
    return pytest.mark.parametrize("ends", kinds, indirect=True)


def test_it_is_a_maker_of_links(ends: Ends) -> None:
    maker: LinkMaker = ends.makers[0]
    assert (maker.name, maker.kinds) == ("tcp", {"cpu", "cuda"})
    assert decode_rendezvous(ends.rendezvous).host == "127.0.0.1"


@over("host host", "device device", "host device", "device host")
def test_bytes_arrive_where_they_belong_and_nowhere_else(ends: Ends) -> None:
    ends.meet()
    sources = [(0, 10), (1000, 250_000), (300_000, 1), (400_000, 90_000)]
    targets = [(500_000, 10), (0, 250_000), (499_999, 1), (300_000, 90_000)]
    ends.move(1, targets, sources)
    ends.moved(1)
    written = bytearray(SIZE)
    for (target, size), (source, _) in zip(targets, sources, strict=True):
        written[target : target + size] = ends.bytes[1][source : source + size]
    assert ends.bytes[0] == written
    ends.move(2, [(7, 5)], [(9, 5)])
    ends.moved(2)
    assert ends.bytes[0][7:12] == ends.bytes[1][9:14]
    ends.close()
    assert [memory.host_buffers for memory in ends.memories] == [[], []], "page-locked memory is given back"


def test_whoever_waits_for_news_is_woken(ends: Ends) -> None:
    woken = threading.Semaphore(0)
    ends.makers[0].open(woken.release)
    for link in ends.links:
        link.begin()
    assert woken.acquire(timeout=20)
    assert ends.links[0].news() == [Ready()]
    until(ends.links[1], bool)
    ends.move(1, [(0, SIZE)], [(0, SIZE)])
    assert woken.acquire(timeout=20)
    assert ends.links[0].news() == [Moved(1)]
    ends.links[0].abort()
    assert woken.acquire(timeout=20)


def test_nothing_to_move_has_moved(ends: Ends) -> None:
    ends.meet().move(1, [], [])
    assert ends.links[0].news() == ends.links[1].news() == [Moved(1)]


@over("device device")
def test_a_device_that_is_slow_holds_up_the_connection_and_not_the_bytes(ends: Ends) -> None:
    ends.meet()
    ends.cards.copies_per_look = 1
    ends.move(1, [(0, SIZE)], [(0, SIZE)])
    ends.moved(1)
    assert ends.bytes[0] == ends.bytes[1]


@over("device host")
def test_a_device_that_fails_is_said_with_its_own_code(ends: Ends) -> None:
    ends.meet()
    ends.cards.fault = "cudaErrorIllegalAddress"
    ends.move(1, [(0, 10)], [(0, 10)])
    assert broken(ends.links[0]).code == "device_fault"


@over("device device")
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_page_locked_memory_that_runs_out_is_given_back_and_said(
    ends: Ends, num_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, left = ends.memories[0].allocate_host, [num_buffers]

    def scarce(device: int, num_bytes: int) -> HostBuffer:
        left[0] -= 1
        if left[0] < 0:
            raise DeviceUnavailable("no page-locked memory is left")
        return allocate(device, num_bytes)

    monkeypatch.setattr(ends.memories[0], "allocate_host", scarce)
    for link in ends.links:
        link.begin()
    told = broken(ends.links[0])
    assert (told.code, "no page-locked memory" in told.message) == ("device_unavailable", True)
    assert ends.memories[0].host_buffers == []
    ends.close()
    assert ends.memories[1].host_buffers == []


def test_an_end_that_was_stopped_before_it_met_anybody_takes_no_connection(ends: Ends) -> None:
    ends.links[0].stop()
    with dial(ends.rendezvous, encode_hello(decode_rendezvous(ends.rendezvous), 0)) as connection:
        assert is_refused(connection)
    ends.links[0].begin()
    assert "the pair was given up" in broken(ends.links[0]).message


def test_without_a_device_no_half_is_made_for_one() -> None:
    maker = TcpLinks(SETTINGS, no_devices)
    unique_id = maker.unique_id()
    with pytest.raises(DeviceUnavailable):
        maker.link("cuda:0", unique_id, 0)
    maker.close()


def test_an_end_that_stays_alone_is_ended_by_an_abort(ends: Ends) -> None:
    ends.links[0].begin()
    time.sleep(0.05)
    assert ends.links[0].news() == []
    ends.links[0].abort()
    found = until(ends.links[0], lambda found: Stopped() in found)
    assert isinstance(found[0], Broken)


def test_an_abort_ends_a_receive_that_nobody_serves_and_nothing_writes_afterwards(ends: Ends) -> None:
    ends.meet()
    ends.links[0].move(1, ends.pages[0], [(0, SIZE)])
    ends.links[0].abort()
    until(ends.links[0], lambda found: Stopped() in found)
    before = bytes(ends.bytes[0])
    ends.links[1].move(1, ends.pages[1], [(0, SIZE)])
    broken(ends.links[1])
    assert ends.bytes[0] == before


def test_an_abort_ends_a_send_that_nobody_reads(ends: Ends) -> None:
    ends.meet()
    ends.bytes[1][:] = bytes(SIZE)
    large = memoryview(bytearray(64 << 20))
    ends.links[1].move(1, large, [(0, len(large))])
    time.sleep(0.05)
    assert ends.links[1].news() == [], "the kernel's buffers are full, the thread waits"
    ends.links[1].abort()
    until(ends.links[1], lambda found: Stopped() in found)
    large.release()


def test_the_other_end_sees_an_abort(ends: Ends) -> None:
    ends.meet()
    ends.links[0].move(1, ends.pages[0], [(0, SIZE)])
    ends.links[1].stop()
    assert broken(ends.links[0]).code == "pair_aborted"


def test_a_pool_that_is_closed_under_a_transfer(ends: Ends) -> None:
    ends.meet()
    pages = ends.pages[1]
    assert isinstance(pages, memoryview)
    pages.release()
    ends.move(1, [(0, 10)], [(0, 10)])
    assert broken(ends.links[1]).code == "pool_closed"


def test_shares_of_other_sizes_than_ordered_are_refused(ends: Ends) -> None:
    ends.meet()
    ends.move(1, [(0, 10)], [(0, 11)])
    told = broken(ends.links[0])
    assert (told.code, "transfer 1 with 11 bytes" in told.message) == ("bad_stream", True)
    assert not any(ends.bytes[0])


def dial(rendezvous: bytes, hello: bytes = b"") -> socket.socket:
    """A connection to who waits for a pair, on which `hello` was said."""
    wanted = decode_rendezvous(rendezvous)
    connection = socket.create_connection((wanted.host, wanted.port), timeout=10)
    connection.sendall(hello)
    return connection


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_refused(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


STRANGERS = {
    "garbage": tcp_listener.NOT_OURS,
    "another secret": tcp_listener.WRONG_TOKEN,
    "another pair": tcp_listener.UNKNOWN_PAIR,
    "a connection too many": tcp_listener.STREAM_TAKEN,
    "the same one": tcp_listener.UNKNOWN_PAIR,
    "the same one before the others": tcp_listener.STREAM_TAKEN,
    "nothing": tcp_listener.NO_TOKEN,
    "half of it": tcp_listener.NO_TOKEN,
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_are_refused_and_the_pair_comes_about_all_the_same(ends: Ends, what: str) -> None:
    told: list[str] = []
    ends.makers[0].open(lambda: told.append("once"))
    rendezvous = decode_rendezvous(ends.rendezvous)
    hello = {
        "garbage": bytes(64),
        "another secret": encode_hello(msgspec.structs.replace(rendezvous, secret=b"x" * 32), 0),
        "another pair": encode_hello(msgspec.structs.replace(rendezvous, key=b"x" * 16), 0),
        "a connection too many": encode_hello(rendezvous, 3),
        "the same one": encode_hello(rendezvous, 0),
        "the same one before the others": encode_hello(rendezvous, 0),
        "nothing": b"",
        "half of it": encode_hello(rendezvous, 0)[:40],
    }[what]
    with contextlib.ExitStack() as stack:
        if what == "the same one":
            ends.meet()
        if what == "the same one before the others":
            first = stack.enter_context(dial(ends.rendezvous, hello))
            assert len(first.recv(32, socket.MSG_WAITALL)) == 32
        for _ in range(2):
            peer = stack.enter_context(dial(ends.rendezvous, hello))
            peer.shutdown(socket.SHUT_WR)
            assert is_refused(peer)
        if not what.startswith("the same one"):
            ends.meet()
    refused = {why: number for why, number in ends.makers[0].refused.items() if number}
    assert refused == {STRANGERS[what]: 2}
    assert told.count("once") >= 1


def test_a_token_that_comes_late_is_refused_and_said_so_where_it_was_shown(ends: Ends) -> None:
    ends.links[0].begin()
    ends.links[0].stop()
    ends.links[1].begin()
    told = broken(ends.links[1])
    assert told.code == "token_refused"
    assert "rejected the pair's token" in told.message
    assert ends.makers[0].refused[tcp_listener.UNKNOWN_PAIR] == 1


def test_who_says_nothing_is_closed_after_a_while(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_listener, "_HELLO_S", 0.1)
    with dial(ends.rendezvous, b"KVME") as peer:
        assert is_refused(peer)


def test_one_that_resets_its_connection_is_dropped(ends: Ends) -> None:
    reset(dial(ends.rendezvous, b"KVME"))
    ends.meet()
    wait_for(lambda: ends.makers[0].refused[tcp_listener.NO_TOKEN])


def test_who_dials_while_there_are_no_descriptors_left_waits(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, num_failures = socket.socket.accept, 0

    def failing(self: socket.socket) -> object:
        nonlocal num_failures
        num_failures += 1
        if num_failures <= 2:
            raise OSError(errno.EMFILE, "too many open files")
        if num_failures == 3:
            raise BlockingIOError
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    ends.meet()
    assert num_failures > 3


def test_a_listener_that_is_closed_ends_what_waits_and_drops_who_has_said_nothing(ends: Ends) -> None:
    listener = tcp_listener.TcpListener("127.0.0.1", 0)
    expected = listener.expect(1, 1 << 20)
    offer = encode_rendezvous(expected.rendezvous)
    with dial(offer) as peer:
        with dial(offer, bytes(64)) as later:
            assert is_refused(later), "and so the earlier one has been let in"
        listener.close()
        assert is_refused(peer)
    assert expected.arrived.get(timeout=5) is None


def test_there_is_a_bound_on_strangers(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_listener, "_MAX_UNAUTHENTICATED", 2)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(ends.rendezvous)) for _ in range(3)]
        assert is_refused(strangers[0]), "the one that has been silent longest"
        ends.meet()


def test_who_dials_fast_crowds_out_nobody_of_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_listener, "_MAX_UNAUTHENTICATED", 4)
    listener = tcp_listener.TcpListener("127.0.0.1", 0)
    expected = listener.expect(1, MIN_CHUNK_BYTES)
    offer, hello = encode_rendezvous(expected.rendezvous), encode_hello(expected.rendezvous, 0)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        dialled = socket.create_connection((listener.host, listener.port), 20, ("127.0.0.5", 0))
        slow = stack.enter_context(dialled)
        slow.sendall(hello[:8])
        strangers = [stack.enter_context(dial(offer)) for _ in range(20)]
        assert all(is_refused(stranger) for stranger in strangers[:-4])
        slow.sendall(hello[8:])
        assert slow.recv(32) == answer_to(expected.rendezvous, 0)
        arrived = expected.arrived.get(timeout=20)
        assert arrived is not None
        arrived[1].close()


def dialling(port: int) -> PairLink:
    """An end that was offered a pair at `port` and goes there."""
    rendezvous = Rendezvous("127.0.0.1", port, b"k" * 16, b"s" * 32, 1, MIN_CHUNK_BYTES)
    link = TcpLinks(SETTINGS, no_devices).link(CPU, encode_rendezvous(rendezvous), 1)
    link.begin()
    return link


def test_an_impostor_that_listens_is_sent_no_page() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        link = dialling(impostor.getsockname()[1])
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(bytes(32))
            told = broken(link)
            assert "is not the agent that made the offer" in told.message
        link.stop()


def test_nobody_at_the_address_that_was_offered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = dialling(port)
    assert "refused" in broken(link).message
    link.stop()


@pytest.fixture
def connections(ends: Ends) -> Iterator[list[socket.socket]]:
    """What dials in place of the other end, properly introduced."""
    rendezvous = decode_rendezvous(ends.rendezvous)
    connections: list[socket.socket] = []
    ends.links[0].begin()
    for index in range(rendezvous.num_streams):
        connection = dial(ends.rendezvous, encode_hello(rendezvous, index))
        assert len(connection.recv(32, socket.MSG_WAITALL)) == 32
        connections.append(connection)
    assert until(ends.links[0], bool) == [Ready()]
    yield connections
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("garbage", [bytes(24), encode_header(1, 1 << 60), encode_header(2, 10)])
def test_garbage_on_a_connection_of_the_pair(ends: Ends, connections: list[socket.socket], garbage: bytes) -> None:
    ends.links[0].move(1, ends.pages[0], [(0, 10)])
    connections[0].sendall(garbage + bytes(1000))
    assert broken(ends.links[0]).code == "bad_stream"
    assert not any(ends.bytes[0])


@pytest.mark.parametrize("is_reset", [False, True])
def test_an_end_that_goes_in_the_middle_of_a_share(
    ends: Ends, connections: list[socket.socket], is_reset: bool
) -> None:
    """As one does that is killed. The other connections wait for shares that never come."""
    ends.links[0].move(1, ends.pages[0], [(0, SIZE)])
    share, *_ = shares([(0, SIZE)], len(connections), MIN_CHUNK_BYTES)
    connections[0].sendall(encode_header(1, num_bytes_of(share)) + b"p" * 1000)
    (reset if is_reset else socket.socket.close)(connections[0])
    told = broken(ends.links[0])
    assert (told.code, "connection" in told.message.lower()) == ("pair_aborted", True)


def test_an_address_that_cannot_be_listened_at() -> None:
    for settings in (TcpSettings(host="192.0.2.1"), TcpSettings(port=1, host="192.0.2.1")):
        with pytest.raises(TransferError, match=r"kv_agent\.tcp") as caught:
            TcpLinks(settings, no_devices).open(lambda: None)
        assert caught.value.code == "tcp_unavailable"


@pytest.mark.parametrize(
    ("host", "bind"), [("127.0.0.2", "0.0.0.0"), ("localhost", "127.0.0.1"), ("127.0.0.2", "::"), ("::1", "")]
)
def test_it_listens_at_one_address_and_is_told_by_another(host: str, bind: str) -> None:
    try:
        ends = Ends(settings=msgspec.structs.replace(SETTINGS, host=host, bind=bind, trusted_network=True))
    except TransferError:
        pytest.skip("no IPv6 here")
    ends.meet().move(1, [(0, 10)], [(0, 10)])
    ends.moved(1)
    ends.close()


@pytest.mark.parametrize(("addresses", "bind"), [
    (["::1"], "::1"), (["::1"], ""), (["::1", "127.0.0.1"], "::1"), (["127.0.0.3", "127.0.0.1"], "127.0.0.1"),
])  # fmt: skip
def test_a_name_may_have_any_addresses_of_which_one_is_listened_at(
    addresses: list[str], bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo

    def found(host: str, port: int, **options: int) -> list[tuple[object, ...]]:
        asked = addresses if host == "kv-of-d" else [host]
        return [entry for one in asked for entry in look_up(one, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    try:
        ends = Ends(settings=msgspec.structs.replace(SETTINGS, host="kv-of-d", bind=bind, trusted_network=True))
    except TransferError:
        pytest.skip("no IPv6 here")
    ends.meet().move(1, [(0, 10)], [(0, 10)])
    ends.moved(1)
    ends.close()


@pytest.mark.parametrize(("num_cores", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4), (64, 4)])
def test_connections_by_cores(num_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection keeps a core busy at each end, and there is other work."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    maker = TcpLinks(TcpSettings(), no_devices)
    try:
        assert decode_rendezvous(maker.unique_id()).num_streams == expected
    finally:
        maker.close()
