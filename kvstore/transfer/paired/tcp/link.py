"""One half of a pair over several parallel raw TCP connections, each with its own thread.

The receiving end listens (`listener.py`), the sending end dials; both prove that they know a secret that was sent only
over the mesh. Threads block in the kernel and hold no lock there, so the agent's loop goes on; TCP's own flow control
is the backpressure. An abort shuts the connections down, which wakes every thread, and `Stopped` is reported when the
last has ended: from then on nothing writes. Deadlines are the pair's (`pair.py`): when one passes, it aborts, and every
wait here ends.

Pages in host memory go straight between pool and socket, those on a device through page-locked buffers (`staging.py`).
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
from typing_extensions import override

from kvstore.errors import KVError, TransferError
from kvstore.pool.cuda.memory import DeviceMemory
from kvstore.pool.device import CPU, CUDA, cuda_ordinal
from kvstore.transfer.paired.link import (
    Broken,
    LinkMaker,
    Memory,
    Moved,
    News,
    PairLink,
    Ready,
    Stopped,
    all_news,
)
from kvstore.transfer.paired.pair import PAIR_ABORTED
from kvstore.transfer.paired.tcp.listener import Expected, TcpListener, addresses_of
from kvstore.transfer.paired.tcp.staging import Copier, HostCopier, StagedCopier, receive_all, send_all
from kvstore.transfer.paired.tcp.wire import (
    ANSWER_BYTES,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_STREAMS,
    MIN_CHUNK_BYTES,
    Part,
    Rendezvous,
    address_of,
    answer_to,
    decode_rendezvous,
    encode_header,
    encode_hello,
    encode_rendezvous,
    is_name,
    num_bytes_of,
    require_header,
    shares,
)

TCP: Final = "tcp"

_DIAL_S: Final = 10.0
"""Of each connection, half of the pair's own time (20 s), so that a host that is away is reported as that."""
_MOST_BY_CORES: Final = 4
"""On two cores four connections moved no more than two (3.1 GB/s), and each end has a thread for every one."""


class TcpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`host` is the IP address or name at which others reach this agent; `port` 0 is any free one.

    `bind` is the IP address to listen at if that is another one (`0.0.0.0` and `::`: all of its host). Pages go over it
    neither encrypted nor signed, so an address other than loopback needs `trusted_network`, by which the operator
    vouches that nobody else reads or writes there. A transfer is split over `num_streams` connections (0: half as many
    as the receiver has cores, up to four) in chunks of at most `chunk_bytes`; with pages on a device, each connection
    has two page-locked buffers of that size at each end.
    """

    host: str = "127.0.0.1"
    port: int = 0
    num_streams: int = 0
    chunk_bytes: int = 2 << 20
    trusted_network: bool = False
    bind: str = ""

    def problem(self) -> str:
        """Why these settings cannot be used; empty if they can."""
        told, bound = address_of(self.host), address_of(self.bind or self.host)
        if told is None and not is_name(self.host):
            return f"host {self.host!r} is neither an IP address nor a name"
        if told is not None and told.is_unspecified:
            return f"host {self.host} means every address, but other agents connect to it: give one network's address"
        if self.bind and bound is None:
            return f"bind {self.bind!r} is not an IP address"
        if not (self.trusted_network or (bound is not None and bound.is_loopback)):
            where = self.bind or self.host
            return f"pages go over {where} unencrypted: set trusted_network if nobody else reads or writes there"
        if not 0 <= self.num_streams <= MAX_STREAMS:
            return f"num_streams must be 1 to {MAX_STREAMS}, or 0 (from the number of cores), not {self.num_streams}"
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            return f"chunk_bytes must be {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}, not {self.chunk_bytes}"
        return "" if 0 <= self.port <= 65535 else f"port must be 0 to 65535, not {self.port}"


class _Job(NamedTuple):
    """One connection's share of a transfer."""

    number: int
    memory: Memory
    chunks: list[list[Part]]


class TcpLinks(LinkMaker):
    """Links over TCP. `load` returns the devices' memory, for pools on devices."""

    name: ClassVar[str] = TCP
    kinds: ClassVar[frozenset[str]] = frozenset({CPU, CUDA})
    # Threads do the work: polling again at once would only take the interpreter from them.
    eager_polls: ClassVar[int] = 0

    def __init__(self, settings: TcpSettings, load: Callable[[], DeviceMemory]) -> None:
        self._settings = settings
        self._load = load
        self._listener: TcpListener | None = None
        # Until `open` nobody is woken: news is polled for now and then.
        self._wake: Callable[[], None] = lambda: None

    @override
    def open(self, wake: Callable[[], None]) -> str:
        self._wake = wake
        return self._listening().address

    @property
    @override
    def refused(self) -> Mapping[str, int]:
        return self._listener.refused if self._listener is not None else {}

    @override
    def unique_id(self) -> bytes:
        """An encoded `Rendezvous`."""
        # A connection's thread fills a core (2.6 GB/s), and the loop and the workers need cores too: with two cores, a
        # second connection gave 3.1 instead of 2.6 GB/s, and 0.87 instead of 1.04 of what plain sockets move there.
        num_streams = self._settings.num_streams or min(_MOST_BY_CORES, max(1, len(os.sched_getaffinity(0)) // 2))
        expected = self._listening().expect(num_streams, self._settings.chunk_bytes)
        return encode_rendezvous(expected.rendezvous)

    @override
    def link(self, device: str, unique_id: bytes, rank: int) -> "TcpLink":
        """Raises TransferError `bad_offer`, DeviceError."""
        rendezvous = decode_rendezvous(unique_id)
        expected = self._listener.expected(rendezvous.key) if self._listener is not None and not rank else None
        try:
            memory = None if device == CPU else self._load()
        except KVError:
            if expected is not None and self._listener is not None:
                self._listener.forget(expected)
            raise

        def copier() -> Copier:
            if memory is None:
                return HostCopier()
            return StagedCopier(memory, cuda_ordinal(device), rendezvous.chunk_bytes)

        return TcpLink(rendezvous, rank, copier, self._listener, expected, lambda: self._wake())

    def _listening(self) -> TcpListener:
        if self._listener is None:
            settings = self._settings
            self._listener = TcpListener(settings.host, settings.port, settings.bind, lambda: self._wake())
        return self._listener

    @override
    def close(self) -> None:
        """Stop listening; existing links go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class TcpLink(PairLink):
    """One half of a pair over TCP connections. Rank 0 accepts those that it `expected`, rank 1 makes them."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        copier: Callable[[], Copier],
        listener: TcpListener | None,
        expected: Expected | None,
        wake: Callable[[], None],
    ) -> None:
        self._wake = wake
        self._rendezvous = rendezvous
        self._rank = rank
        self._copier = copier
        self._listener = listener
        self._expected = expected
        self._news: SimpleQueue[News] = SimpleQueue()
        self._jobs: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(rendezvous.num_streams)]
        self._threads: list[threading.Thread] = []
        # The lock guards what follows: connections in use, how many connections still work on each transfer, and
        # whether all is over.
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._left: dict[int, int] = {}
        self._is_aborted = False

    @override
    def begin(self) -> None:
        self._start(self._initialise, "meet")

    @override
    def move(self, number: int, memory: Memory, parts: Sequence[Part]) -> None:
        dealt = shares(parts, self._rendezvous.num_streams, self._rendezvous.chunk_bytes)
        busy = [(queue, chunks) for queue, chunks in zip(self._jobs, dealt, strict=True) if chunks]
        if not busy:
            self._say(Moved(number))
            return
        with self._lock:
            # Set before any thread has its share: the first may be done before the last is queued.
            self._left[number] = len(busy)
        for queue, chunks in busy:
            queue.put(_Job(number, memory, chunks))

    @override
    def abort(self) -> None:
        """End it from a thread: closing may wait for a running copy, which the loop must not."""
        threading.Thread(target=self.stop, name="tcp-abort", daemon=True).start()

    @override
    def news(self) -> list[News]:
        return all_news(self._news)

    @override
    def stop(self) -> None:
        with self._lock:
            self._is_aborted = True
            for connection in self._sockets:
                # Not close: a thread in the kernel with this descriptor must not find another file there.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self._listener is not None and self._expected is not None:
            self._listener.forget(self._expected)
        for queue in self._jobs:
            # Threads that wait for work are in `get`, where no shutdown of a socket reaches them.
            queue.put(None)
        # The first thread starts the others: when it has ended, the list is complete.
        for first in self._threads[:1]:
            first.join()
        for thread in self._threads:
            thread.join()
        if self._expected is not None:
            self._expected.close_arrived()
        with self._lock:
            for connection in self._sockets:
                connection.close()
        self._say(Stopped())

    def _say(self, news: News) -> None:
        self._news.put(news)
        self._wake()

    # threads

    def _start(self, target: Callable[..., None], name: str, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"tcp-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _initialise(self) -> None:
        try:
            connections = self._dial() if self._rank else self._await()
            copiers = self._copiers(len(connections))
        except (OSError, KVError) as error:
            self._say(_broken("connecting to the other end over tcp", error))
            return
        for index, (connection, copier) in enumerate(zip(connections, copiers, strict=True)):
            self._start(self._work, f"stream-{index}", index, connection, copier)
        self._say(Ready())

    def _copiers(self, count: int) -> list[Copier]:
        copiers: list[Copier] = []
        try:
            while len(copiers) < count:
                copiers.append(self._copier())
        except BaseException:
            # Page-locked memory is not freed with the object, and those after it may fail for lack of it.
            for copier in copiers:
                copier.close()
            raise
        return copiers

    def _await(self) -> list[socket.socket]:
        """Rank 0: wait for all connections; returns them in order."""
        if self._expected is None:
            raise TransferError("bad_offer", "this agent does not listen for this pair")
        came: dict[int, socket.socket] = {}
        # No timeout here: the pair's own deadline aborts it, which puts a None into the queue.
        while len(came) < self._rendezvous.num_streams:
            arrived = self._expected.arrived.get()
            if arrived is None:
                raise ConnectionAbortedError("the pair was given up")
            came[arrived[0]] = self._adopt(arrived[1])
        return [came[index] for index in sorted(came)]

    def _dial(self) -> list[socket.socket]:
        """Rank 1: make the connections. On each, both ends prove themselves before a page is read."""
        host, port = self._rendezvous.host, self._rendezvous.port
        addresses = addresses_of(host, port)
        dialled: list[socket.socket] = []
        for index in range(self._rendezvous.num_streams):
            connection = self._connected(addresses)
            dialled.append(connection)
            connection.sendall(encode_hello(self._rendezvous, index))
            answer = bytearray(ANSWER_BYTES)
            try:
                receive_all(connection, [memoryview(answer)])
            except ConnectionResetError:
                raise TransferError(
                    "token_refused",
                    f"the listener at {host}:{port} rejected the pair's token: the offer was withdrawn, already used, "
                    "or made by another agent",
                ) from None
            # Before a byte of a page is sent: somebody else may listen at that port by now.
            if bytes(answer) != answer_to(self._rendezvous, index):
                raise TransferError("bad_stream", f"the listener at {host}:{port} is not the agent that made the offer")
            connection.settimeout(None)
        return dialled

    def _connected(self, addresses: list[tuple[socket.AddressFamily, Any]]) -> socket.socket:
        """A connection to the first address that takes one; those before it are removed. Raises OSError of the last."""
        while True:
            family, address = addresses[0]
            connection = self._adopt(socket.socket(family))
            # Only while connecting; a page's bytes may take long, and the transfer has its own deadline.
            connection.settimeout(_DIAL_S)
            try:
                connection.connect(address)
                return connection
            except OSError:
                # An abort closes it, too: then `_adopt` raises for the next one.
                connection.close()
                if len(addresses) == 1:
                    raise
                del addresses[0]

    def _adopt(self, connection: socket.socket) -> socket.socket:
        """Let an abort reach this connection from here on. Raises ConnectionAbortedError after an abort."""
        with self._lock:
            if self._is_aborted:
                connection.close()
                raise ConnectionAbortedError("the pair was aborted")
            self._sockets.append(connection)
        # A header is 24 bytes: Nagle would hold it back until the other end acknowledges what came before.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A pair may be idle for hours, and a host that loses power closes nothing.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _work(self, index: int, connection: socket.socket, copier: Copier) -> None:
        try:
            # One queue for each connection, not one for all: both ends must agree which connection has which share.
            while (job := self._jobs[index].get()) is not None and not self._is_aborted:
                (self._send if self._rank else self._receive)(connection, copier, job)
                with self._lock:
                    self._left[job.number] -= 1
                    is_last = not self._left[job.number]
                    if is_last:
                        del self._left[job.number]
                if is_last:
                    self._say(Moved(job.number))
        except (OSError, KVError) as error:
            self._say(_broken("moving pages over tcp", error))
        finally:
            copier.close()

    def _send(self, connection: socket.socket, copier: Copier, job: _Job) -> None:
        header = encode_header(job.number, num_bytes_of(job.chunks))
        send_all(connection, [memoryview(header)])
        copier.send(connection, job.memory, job.chunks)

    def _receive(self, connection: socket.socket, copier: Copier, job: _Job) -> None:
        header = bytearray(HEADER_BYTES)
        receive_all(connection, [memoryview(header)])
        require_header(bytes(header), job.number, num_bytes_of(job.chunks))
        copier.receive(connection, job.memory, job.chunks)


def _broken(what: str, error: OSError | KVError) -> Broken:
    return Broken(f"{what} failed: {error}", error.code if isinstance(error, KVError) else PAIR_ABORTED)
