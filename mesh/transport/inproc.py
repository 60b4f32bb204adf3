"""Actors in one process and one event loop, in real time: no sockets, no faults. For tests and for embedding.

An `InprocNetwork` is the shared switchboard; frames go over as they are, by `call_soon`.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from mesh.address import Address, Endpoint
from mesh.errors import BindError
from mesh.transport.base import Buffer, Lane, Link, Listener

_MAX_UNDER_WAY: Final = 4096


class InprocNetwork:
    """Which endpoints there are. `kill` makes an incarnation vanish as a process would."""

    def __init__(self) -> None:
        self._bound: dict[str, InprocTransport] = {}

    def transport(self) -> "InprocTransport":
        """A transport for one incarnation."""
        return InprocTransport(self)

    def kill(self, address: Address) -> None:
        """Nothing more is sent or heard by this incarnation; whoever dialed it sees the link go down."""
        transport = self._bound.get(_name(address))
        if transport is not None:
            transport.vanish("the peer is gone")

    def bind(self, name: str, transport: "InprocTransport") -> None:
        """Listen under a name; raises `BindError`."""
        if name in self._bound:
            raise BindError(f"{name} is bound already: an incarnation has one transport")
        self._bound[name] = transport

    def unbind(self, name: str) -> None:
        """Listen no longer."""
        self._bound.pop(name, None)

    def find(self, name: str) -> "InprocTransport | None":
        """Who listens under a name."""
        return self._bound.get(name)


class _Connection:
    """One dialed link: both ends, and what is under way each way and lane."""

    __slots__ = ("acceptor", "dialer", "is_open", "under_way")

    def __init__(self, dialer: "InprocTransport", acceptor: "InprocTransport | None") -> None:
        self.dialer = dialer
        self.acceptor = acceptor
        self.is_open = True
        self.under_way = [[0, 0], [0, 0]]


class InprocTransport:
    """Implements `mesh.transport.base.Transport`."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._address: Address | None = None
        self._listener: Listener | None = None
        self._connections: dict[Link, _Connection] = {}

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        """Bind; raises `BindError` if this incarnation is bound already."""
        name = _name(address)
        self._network.bind(name, self)
        self._address, self._listener = address, listener
        return Endpoint(f"{name}.c", f"{name}.d")

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        """Connect; if nobody is there the link goes down at once."""
        link = Link(peer, dialed=True)
        acceptor = self._network.find(endpoint.control.removesuffix(".c"))
        connection = self._connections[link] = _Connection(self, acceptor)
        if acceptor is None or self._address is None:
            self._loop.call_soon(self.end, link, connection, "nobody listens there")
        else:
            acceptor.accept(Link(self._address, dialed=False), connection)
        return link

    def accept(self, link: Link, connection: _Connection) -> None:
        """Somebody dialed this transport."""
        self._connections[link] = connection

    def send(self, link: Link, lane: Lane, parts: Sequence[Buffer]) -> bool:
        """Hand over by `call_soon`; buffers that their owner may change are copied."""
        connection = self._connections.get(link)
        if connection is None or not connection.is_open or self._address is None:
            return False
        receiver = connection.acceptor if link.dialed else connection.dialer
        counts = connection.under_way[link.dialed]
        if receiver is None or counts[lane] >= _MAX_UNDER_WAY:
            return False
        counts[lane] += 1
        there = Link(self._address, dialed=not link.dialed)
        kept = tuple(part if isinstance(part, bytes) else bytes(part) for part in parts)
        self._loop.call_soon(receiver.deliver, there, lane, kept, connection)
        return True

    def deliver(self, link: Link, lane: Lane, parts: Sequence[Buffer], connection: _Connection) -> None:
        """A message comes in, unless its connection has ended meanwhile."""
        connection.under_way[not link.dialed][lane] -= 1
        if self._connections.get(link) is connection and self._listener is not None:
            self._listener.on_frames(link, lane, parts)

    def close_link(self, link: Link) -> None:
        """Forget a connection; the far side that dialed it sees it go down."""
        connection = self._connections.pop(link, None)
        if connection is not None:
            self._hang_up(link, connection)

    async def stop(self) -> None:
        """Close everything after what was sent has been delivered."""
        await asyncio.sleep(0)
        self.vanish("the peer has stopped")

    def vanish(self, reason: str) -> None:
        """Close everything at once."""
        if self._address is not None:
            self._network.unbind(_name(self._address))
        self._listener = None
        for link, connection in list(self._connections.items()):
            del self._connections[link]
            self._hang_up(link, connection, reason)

    def _hang_up(self, link: Link, connection: _Connection, reason: str = "the peer closed the connection") -> None:
        connection.is_open = False
        if not link.dialed and self._address is not None:
            far = Link(self._address, dialed=True)
            self._loop.call_soon(connection.dialer.end, far, connection, reason)

    def end(self, link: Link, connection: _Connection, reason: str) -> None:
        """The far side of a dialed connection has ended it."""
        if self._connections.get(link) is connection:
            del self._connections[link]
            if self._listener is not None:
                self._listener.on_link_down(link, reason)


def _name(address: Address) -> str:
    return f"inproc://{address}"
