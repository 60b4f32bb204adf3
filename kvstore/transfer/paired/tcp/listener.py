"""The port at which other agents connect for pages: accepts only connections that prove a pair's secret.

One thread, one selector; it never waits for a single peer. A stranger has a few seconds and 64 bytes to say who it is.
There are at most `_MAX_UNAUTHENTICATED` of them: when one more comes, the address with the most loses the one that has
been silent longest. A peer that speaks but cannot prove anything is closed without an answer, and counted in `refused`.
Used by `tcp/link.py`.
"""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

from kvstore.errors import TransferError
from kvstore.transfer.paired.tcp.wire import (
    HELLO_BYTES,
    KEY_BYTES,
    SECRET_BYTES,
    Hello,
    Rendezvous,
    answer_to,
    decode_hello,
    is_proven,
)

_MAX_UNAUTHENTICATED: Final = 64
"""Four pairs of `MAX_STREAMS` that connect at once. A stranger costs a descriptor and 64 bytes."""
_HELLO_S: Final = 5.0
"""A peer sends its hello together with the connection; a lost packet is sent again within 1 to 3 s."""
_NO_DESCRIPTORS_S: Final = 0.1
"""The selector would report the same caller at once, and turn in a circle; dialers wait 10 s."""

NO_TOKEN: Final = "no_token"
"""Silent, gone or crowded out before it had sent a whole hello."""
NOT_OURS: Final = "not_ours"
"""It speaks another protocol."""
UNKNOWN_PAIR: Final = "unknown_pair"
"""The pair was never offered, was given up, or is complete: the hello comes late, or once more."""
STREAM_TAKEN: Final = "stream_taken"
"""The pair still waits, but not for a connection of this number: it has come already, or there is no such number."""
WRONG_TOKEN: Final = "wrong_token"
"""It does not know the secret that went over the mesh."""


class Expected:
    """Connections that one pair waits for; `arrived` gives those that came, and None when there is no more waiting."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.missing = set(range(rendezvous.num_streams))
        self.arrived: SimpleQueue[tuple[int, socket.socket] | None] = SimpleQueue()

    def close_arrived(self) -> None:
        """Close connections that nobody will take; anyone who still waits gets None."""
        with contextlib.suppress(Empty):
            while True:
                arrived = self.arrived.get_nowait()
                if arrived is not None:
                    arrived[1].close()
        self.arrived.put(None)


class _UnauthenticatedPeer:
    __slots__ = ("address", "connection", "data", "deadline")

    def __init__(self, connection: socket.socket, address: str, deadline: float) -> None:
        self.connection = connection
        self.address = address
        self.deadline = deadline
        self.data = bytearray()


class TcpListener:
    """Listens at `bind`, or at `host` if that is empty; others are told `host`.

    `refused` counts strangers by reason; at the first of each reason, the listener's thread calls `tell`. Raises
    TransferError `tcp_unavailable` if it cannot listen at this address.
    """

    def __init__(self, host: str, port: int, bind: str = "", tell: Callable[[], None] = lambda: None) -> None:
        at = bind or host
        # Every address means those of both families: the name that others dial may have either.
        both = at == "::" and socket.has_dualstack_ipv6()
        try:
            # `create_server` does not derive the family from the address.
            family, address = addresses_of(at, port)[0]
            self._socket = socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
        except OSError as error:
            message = (
                f"cannot listen at {at}:{port} ({error}): set [roles.kv_agent.tcp] "
                f"{'bind' if bind else 'host'} to an address of this host"
            )
            raise TransferError("tcp_unavailable", f"{message} and port to a free one, or 0") from None
        self._socket.setblocking(False)
        self.host: str = host
        self.port: int = self._socket.getsockname()[1]
        # Pairs come and go in the agent's thread while the listener's looks for theirs. Held for dictionary work only.
        self._lock = threading.Lock()
        self._expected: dict[bytes, Expected] = {}
        self._unauthenticated: dict[socket.socket, _UnauthenticatedPeer] = {}
        self._is_closed = False
        # All reasons from the beginning: other threads read this dict, and it must not grow under them.
        self.refused: dict[str, int] = dict.fromkeys((NO_TOKEN, NOT_OURS, UNKNOWN_PAIR, STREAM_TAKEN, WRONG_TOKEN), 0)
        self._tell = tell
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        # A pipe to itself: closing the listening socket in another thread would not end `select`.
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tcp-listener", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def expect(self, num_streams: int, chunk_bytes: int) -> Expected:
        key, secret = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(SECRET_BYTES)
        expected = Expected(Rendezvous(self.host, self.port, key, secret, num_streams, chunk_bytes))
        with self._lock:
            self._expected[key] = expected
        return expected

    def expected(self, key: bytes) -> Expected | None:
        with self._lock:
            return self._expected.get(key)

    def forget(self, expected: Expected) -> None:
        with self._lock:
            self._expected.pop(expected.rendezvous.key, None)
        expected.arrived.put(None)

    def close(self) -> None:
        self._is_closed = True
        self._wake.send(b".")
        self._thread.join()
        with self._lock:
            left, self._expected = list(self._expected.values()), {}
        for expected in left:
            expected.arrived.put(None)

    # the thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                # None if there are no strangers: an idle agent is not woken at all.
                soonest = min((peer.deadline for peer in self._unauthenticated.values()), default=None)
                pause = None if soonest is None else max(0.0, soonest - time.monotonic())
                for key, _ in self._selector.select(pause):
                    if key.fileobj is self._socket:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._unauthenticated:
                        self._read(self._unauthenticated[key.fileobj])
                self._drop_silent()
        finally:
            for peer in list(self._unauthenticated.values()):
                self._close(peer)
            self._selector.close()
            for own in (self._socket, self._wake, self._woken):
                own.close()

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptors left: callers stay in the kernel's queue until there are.
            time.sleep(_NO_DESCRIPTORS_S)
            return
        # A stranger that sends half a hello must not hold up the others.
        connection.setblocking(False)
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            self._drop(self._least_missed(), NO_TOKEN)
        self._unauthenticated[connection] = _UnauthenticatedPeer(connection, address, time.monotonic() + _HELLO_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _least_missed(self) -> _UnauthenticatedPeer:
        # The oldest, not the new one: otherwise 64 silent connections would shut real agents out for 5 s each. Of the
        # address that has most: otherwise a fast dialler would crowd out agents of other hosts before they speak.
        ((most, _),) = Counter(peer.address for peer in self._unauthenticated.values()).most_common(1)
        return next(peer for peer in self._unauthenticated.values() if peer.address == most)

    def _read(self, peer: _UnauthenticatedPeer) -> None:
        try:
            data = peer.connection.recv(HELLO_BYTES - len(peer.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.data += data
        if not data:
            self._drop(peer, NO_TOKEN)
        elif len(peer.data) == HELLO_BYTES:
            self._introduce(peer)

    def _introduce(self, peer: _UnauthenticatedPeer) -> None:
        hello = decode_hello(bytes(peer.data))
        if hello is None:
            self._drop(peer, NOT_OURS)
            return
        with self._lock:
            expected = self._expected.get(hello.key)
            why = _refusal(hello, expected)
            if expected is not None and not why:
                # Each number once: a proof that was overheard cannot be used for a second connection.
                expected.missing.discard(hello.stream)
                # Nothing more is expected, so from here on the key is useless to anybody.
                if not expected.missing:
                    del self._expected[hello.key]
        if expected is None or why:
            self._drop(peer, why)
            return
        self._forget(peer)
        try:
            # 32 bytes into the empty buffer of a new connection: they fit, or the peer is gone.
            peer.connection.send(answer_to(expected.rendezvous, hello.stream))
            peer.connection.setblocking(True)
        except OSError:
            peer.connection.close()
            expected.arrived.put(None)
            return
        expected.arrived.put((hello.stream, peer.connection))

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._unauthenticated.values() if peer.deadline <= now]:
            self._drop(peer, NO_TOKEN)

    def _drop(self, peer: _UnauthenticatedPeer, why: str) -> None:
        self.refused[why] += 1
        if self.refused[why] == 1:
            self._tell()
        self._close(peer)

    def _close(self, peer: _UnauthenticatedPeer) -> None:
        self._forget(peer)
        with contextlib.suppress(OSError):
            peer.connection.close()

    def _forget(self, peer: _UnauthenticatedPeer) -> None:
        self._selector.unregister(peer.connection)
        del self._unauthenticated[peer.connection]


def addresses_of(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Families and addresses of a host, by IP or name, IPv4 first, as links have it (`mesh/transport/names.py`).

    Blocks while name servers are asked. Raises OSError if there are none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(((one[0], one[4]) for one in found), key=lambda one: one[0] != socket.AF_INET)


def _refusal(hello: Hello, expected: Expected | None) -> str:
    """Why a connection is not one of those expected; empty if it is."""
    if expected is None:
        return UNKNOWN_PAIR
    if hello.stream not in expected.missing:
        return STREAM_TAKEN
    # Last, and in constant time (`compare_digest`).
    return "" if is_proven(hello, expected.rendezvous.secret) else WRONG_TOKEN
