"""Connections of `mesh/transport/zeromq.py`: what is known of each, and the ZeroMQ routing id that its messages carry.

    routing id = ID#EPOCH#NONCE     of who dials; the nonce is drawn for each connection

So a peer that dials again is another connection to the ROUTER. Of two with the same routing id it takes the later one
and reads the other no more (of one that it did not take it would keep what comes until the port closes): so a routing
id without a nonce that nobody guesses is refused, or somebody else could get what is sent to who has it.
"""

import os
from typing import Final

from mesh.address import Address
from mesh.transport.base import Link
from mesh.transport.zeromq_socket import LoopSocket, Outbox

NOBODY: Final = Address("", 0)
"""The sender of what came without a name: it is refused, and counted, by whoever opens the envelope."""
FROM_NOBODY: Final = Link(NOBODY, dialed=False)
_NONCE_BYTES: Final = 8
MAX_ADDRESS_BYTES: Final = 255 - 2 * _NONCE_BYTES - 1
"""Of an address in a routing id, which ZeroMQ limits to 255."""
_MIN_NONCE_CHARS, _MAX_NONCE_CHARS = 2 * _NONCE_BYTES, 64


class Dialed:
    """A connection that this actor has made. `server_key` is who has to listen there, empty without encryption."""

    __slots__ = ("link", "outboxes", "server_key", "sockets")

    def __init__(self, link: Link, outboxes: tuple[Outbox, Outbox]) -> None:
        self.link = link
        self.outboxes = outboxes
        self.server_key = b""
        self.sockets: list[LoopSocket] = []

    def close(self, linger_ms: int) -> None:
        """Close both channels."""
        for socket in self.sockets:
            socket.close(linger_ms)


class Accepted:
    """A connection that a peer has made; the ROUTER of each channel knows it by its identity. `user`: its User-Id."""

    __slots__ = ("identity", "is_cut", "link", "outboxes", "user")

    def __init__(self, link: Link, identity: bytes, user: bytes, outboxes: tuple[Outbox, Outbox]) -> None:
        self.link = link
        self.identity = identity
        self.user = user
        self.is_cut = False
        self.outboxes = outboxes


def new_identity(address: Address) -> bytes:
    """The routing id of a connection that `address` is about to make."""
    return f"{address}#{os.urandom(_NONCE_BYTES).hex()}".encode()


def link_of(identity: bytes) -> Link:
    """The accepted connection that a routing id names, `FROM_NOBODY` where it names none."""
    try:
        actor_id, epoch, nonce = identity.decode().split("#")
        link = Link(Address.parse(f"{actor_id}#{epoch}"), dialed=False, nonce=nonce)
    except ValueError:
        return FROM_NOBODY
    # Another way to write the same epoch, say: two routing ids must not be one connection.
    is_plain = f"{link.peer}#{nonce}".encode() == identity
    return link if is_plain and _MIN_NONCE_CHARS <= len(nonce) <= _MAX_NONCE_CHARS else FROM_NOBODY
