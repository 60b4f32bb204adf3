"""uvicorn inside the actor's loop: on a socket bound beforehand, without its signal handlers and without polling."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Generator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from mesh.errors import BindError
from nodes.gateway.config import GatewayConfig
from nodes.gateway.http.acceptor import Acceptor, Peer, Refused
from nodes.gateway.http.bodies import BodyBudget
from nodes.gateway.http.protocol import BoundedHttpProtocol, Newcomers

BACKLOG = 2048
"""As uvicorn's; the kernel may lower it (`net.core.somaxconn`, 4,096). Clients in line wait while the loop is busy."""
KEEP_ALIVE_S = 75
"""More than proxies keep idle connections (60 s is common): whoever closes first may lose a request just being sent."""
CLOCK_S = 1.0
"""uvicorn renews its `Date` header at each tick, whose unit is a second."""
STOP_S = 2
"""Requests were drained before; what is left is cut off. Less than the process has for its end (5 s, `mesh/run.py`)."""
NEWCOMER_S = 1.0
"""A request comes with its connection or a round trip later; a client that stays silent must not hold up a drain."""
CLOSE = (b"connection", b"close")


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


class _Uvicorn(uvicorn.Server):
    """Signals are the actor's business, and the clock (for the `Date` header) ticks once a second, not ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), CLOCK_S)


class HttpServer:
    """One uvicorn server on one bound socket."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        config: GatewayConfig,
        budget: BodyBudget,
        refused: Refused,
    ) -> None:
        self._listener = listener
        self._max_connections = config.max_connections
        self._refused = refused
        self.acceptor: Acceptor | None = None
        self._newcomers = Newcomers()
        protocol = partial(BoundedHttpProtocol, newcomers=self._newcomers, budget=budget)
        settings = uvicorn.Config(
            app,
            http=cast("type[BoundedHttpProtocol]", protocol),
            ws="none",
            lifespan="off",
            loop="none",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            # Otherwise any client could choose whose share of the limits its body counts against.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = _Uvicorn(settings)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """How many connections are open."""
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        # uvicorn gets no socket: its own server closes connections without a word when descriptors run out.
        await self._server.startup(sockets=[])
        self.acceptor = Acceptor(
            self._listener, self._make_protocol, lambda: self.num_connections, self._max_connections, self._refused
        )
        self.acceptor.open()
        self._task = asyncio.create_task(self._server.main_loop())

    def leave_port(self) -> None:
        """Take no more connections; other processes that listen on the port get them. Present ones are answered once
        more and then closed, so that their clients connect again.
        """
        state = self._server.server_state
        self._server.config.encoded_headers.append(CLOSE)
        # uvicorn makes the default headers from the encoded ones only once a second.
        state.default_headers = [*state.default_headers, CLOSE]
        if self.acceptor is not None:
            self.acceptor.close()

    async def quiet(self) -> None:
        """Return when no request is being answered, and all new connections have sent one or had the time to."""
        if self.acceptor is not None:
            await self.acceptor.opened()
        await self._newcomers.gone(NEWCOMER_S)
        while tasks := set(self._server.server_state.tasks):
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Take no more connections, and return when those that are left have been answered, or `STOP_S` have passed."""
        if self._task is None or self.acceptor is None:
            self._listener.close()
            return
        self.acceptor.close()
        await self.acceptor.opened()
        self._server.should_exit = True
        self._server.stopping.set()
        await self._task
        # Before `shutdown`, which empties the set.
        tasks = set(self._server.server_state.tasks)
        await self._server.shutdown()
        # uvicorn cancels what is left without waiting for it.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_protocol(self, peer: Peer) -> asyncio.Protocol:
        server = self._server
        make = cast("partial[BoundedHttpProtocol]", server.config.http_protocol_class)
        return make(config=server.config, server_state=server.server_state, app_state=server.lifespan.state, peer=peer)
