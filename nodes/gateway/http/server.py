"""The gateway's HTTP server, inside the actor's loop: a socket bound beforehand, the connections that come to it."""

import asyncio
import errno
import socket
from functools import partial

from mesh.errors import BindError
from nodes.gateway.config import GatewayConfig
from nodes.gateway.http.acceptor import Acceptor, Refused
from nodes.gateway.http.connection import HttpConnection, Served

BACKLOG = 2048
"""The kernel may lower it (`net.core.somaxconn`, 4,096). Clients in line wait while the loop is busy."""
STOP_S = 2
"""Requests were drained before; what is left is cut off. Less than the process has for its end (5 s, `mesh/run.py`)."""
NEWCOMER_S = 1.0
"""A request comes with its connection or a round trip later; a client that stays silent must not hold up a drain."""


def bind(config: GatewayConfig) -> socket.socket:
    """Port 0 lets the system choose. Raises `BindError` saying what to do about it."""
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise BindError(f"{where} is not an address: {error.strerror}. Set another --host.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # Otherwise the successor of a dead gateway would wait for the minute in which the old connections linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"{where} is taken by another process. Stop that one, or set another --port."
        elif error.errno == errno.EACCES:
            message = f"{where} needs rights that this process lacks. Set a --port above 1023."
        else:
            message = f"cannot listen on {where}: {error.strerror}. Set another --host or --port."
        raise BindError(message) from error
    return listener


class HttpServer:
    """One bound socket, and the connections that it brings to what is `served`. `refused` is told of those that there
    is no room for, beside `max_connections`.
    """

    def __init__(self, served: Served, listener: socket.socket, max_connections: int, refused: Refused) -> None:
        self._served = served
        self._listener = listener
        self._max_connections = max_connections
        self._refused = refused
        self.acceptor: Acceptor | None = None

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """How many connections are open."""
        return len(self._served.connections)

    def start(self) -> None:
        make = partial(HttpConnection, self._served)
        self.acceptor = Acceptor(
            self._listener, make, lambda: self.num_connections, self._max_connections, self._refused
        )
        self.acceptor.open()

    def leave_port(self) -> None:
        """Take no more connections; other processes that listen on the port get them. Present ones are answered once
        more and then closed, so that their clients connect again.
        """
        self._served.is_leaving = True
        if self.acceptor is not None:
            self.acceptor.close()

    async def quiet(self) -> None:
        """Return when no request is being answered, and all new connections have sent one or had the time to."""
        if self.acceptor is not None:
            await self.acceptor.opened()
        if newcomers := [one.asked for one in self._served.connections if not one.asked.done()]:
            await asyncio.wait(newcomers, timeout=NEWCOMER_S)
        while self._served.tasks:
            await asyncio.wait(self._served.tasks)

    async def stop(self) -> None:
        """Take no more connections, and return when those that are left have been answered, or `STOP_S` have passed."""
        if self.acceptor is None:
            self._listener.close()
            return
        self.leave_port()
        await self.acceptor.opened()
        for connection in self._served.connections:
            connection.shut()
        if left := [one.closed for one in self._served.connections]:
            await asyncio.wait(left, timeout=STOP_S)
        tasks = set(self._served.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
