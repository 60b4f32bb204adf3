"""Takes connections from the listening socket, and answers those that there is no room for.

The event loop's own server takes every connection, and once there is no descriptor left it closes new ones without a
word. Here the last descriptors are kept for the mesh's own links: a connection that would get one of them, or is one
too many, is answered with a 503 and closed.
"""

import asyncio
import contextlib
import errno
import resource
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

from nodes.gateway.errors import Unavailable

RESERVED_FILES = 64
"""Descriptors kept from clients: for links to actors that come later, dials, and clients being refused."""

MAX_LINGERING = 16
"""A quarter of `RESERVED_FILES`: clients being refused must not take what links and dials are kept for."""
LINGER_S = 1.0
"""The answer reaches most clients within a round trip; 16 at a time, so at least 16 a second read theirs in peace."""
_MAX_AT_ONCE = 64
"""After so many of a flood the loop serves the others; with fewer, a burst of new clients pays a turn for each."""
_PAUSE_S = 0.1
"""The listener stays readable meanwhile, so without a pause the loop would spin; a client hardly notices 0.1 s."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Peer = tuple[str, int]
"""An address, and a port."""
Refused = Callable[[str], None]
"""Called with the reason why a connection was refused."""


class Acceptor:
    """One listening socket. `make_protocol` makes the protocol of each connection, given where that comes from;
    `num_connections` counts those that have one; `refused` is called for each that got none.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Peer], asyncio.Protocol],
        num_connections: Callable[[], int],
        max_connections: int,
        refused: Refused,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._num_connections = num_connections
        self._max_connections = max_connections
        self._refused = refused
        self._max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._lingering: deque[socket.socket] = deque()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Take the connections that have come and no more; frees the port. Calling this again is harmless."""
        if self._is_open:
            # Clients in the kernel's queue consider themselves connected, and would be reset.
            self._accept()
            self._is_open = False
            self._loop.remove_reader(self._listener)
        self._listener.close()
        while self._lingering:
            self._let_go(self._lingering[0])

    async def opened(self) -> None:
        """Return when every connection that was taken has its protocol."""
        while self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                # That client has left already.
                continue
            connection.setblocking(False)
            if self._num_connections() + len(self._opening) >= self._max_connections:
                self._refuse(connection, f"it has {self._max_connections} connections, its maximum")
            # The kernel gives the lowest free descriptor, so its number says how many are left, counting all users.
            elif connection.fileno() >= self._max_files - RESERVED_FILES:
                self._refuse(connection, f"it has as many as `ulimit -n` ({self._max_files}) allows")
            else:
                self._take(connection, address[:2])

    def _take(self, connection: socket.socket, peer: Peer) -> None:
        # Text goes out in small pieces, and the client waits for each of them.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening = self._loop.create_task(self._connect(connection, peer))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket, peer: Peer) -> None:
        try:
            await self._loop.connect_accepted_socket(partial(self._make_protocol, peer), connection)
        except OSError:
            connection.close()

    def _refuse(self, connection: socket.socket, why: str) -> None:
        self._refused(why)
        error = Unavailable(f"This gateway accepts no more connections: {why}.", code="too_many_connections")
        body = error.body("")
        head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        with contextlib.suppress(OSError):
            # Once, without waiting: a few hundred bytes fit the empty buffer of a new connection, or its client is
            # gone.
            connection.send(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
            connection.shutdown(socket.SHUT_WR)
        # Closing a socket before its request was read resets the connection, and the answer may be lost.
        self._lingering.append(connection)
        self._loop.call_later(LINGER_S, self._let_go, connection)
        # Lingering sockets have descriptors too, and there are only `RESERVED_FILES` (64) for everything.
        if len(self._lingering) > MAX_LINGERING:
            self._let_go(self._lingering[0])

    def _let_go(self, connection: socket.socket) -> None:
        if connection in self._lingering:
            self._lingering.remove(connection)
            with contextlib.suppress(OSError):
                # Closing a socket with unread data makes the kernel send a reset, which may overtake the answer.
                connection.recv(65536)
            connection.close()

    def _pause(self, error: OSError) -> None:
        """Something else has used up even the reserve: clients in the queue wait longer and are not turned away."""
        self._refused(f"accept failed ({error.strerror})")
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)
