"""Connections of `mesh/transport/zeromq.py`: the state of each, and the ZeroMQ routing id that its messages carry.

    routing id = ID#EPOCH#NONCE     of the dialing actor; the nonce is drawn for each connection

So a peer that dials again is a new connection to the ROUTER. Of two connections with the same routing id, the ROUTER
takes the later one and stops reading the other. (Without that, it would hold the later one's messages, unread, until
the port closes.) Routing ids without a nonce that cannot be guessed are refused, or another process could take over a
routing id and receive what is sent to its owner.
"""

import os
from typing import Final

from mesh.address import Address
from mesh.transport.base import Link
from mesh.transport.zeromq_socket import LoopSocket, Outbox

NOBODY: Final = Address("", 0)
"""Stands for the sender of an anonymous message, which is refused and counted when its envelope is opened."""
FROM_NOBODY: Final = Link(NOBODY, dialed=False)
_NONCE_BYTES: Final = 8
"""64 bits drawn for each connection, against guessing; twice as many characters of at most 255 in a routing id."""
MAX_ADDRESS_BYTES: Final = 255 - 2 * _NONCE_BYTES - 1
"""Maximum length of an address in a routing id, which ZeroMQ limits to 255 bytes."""
_MIN_NONCE_CHARS, _MAX_NONCE_CHARS = 2 * _NONCE_BYTES, 64


class Dialed:
    """A connection that this actor has dialed.

    `server_key`: the key the listener must have, empty if not encrypted. `by_name`: name and address that were dialed,
    until somebody there answers.
    """

    __slots__ = ("by_name", "link", "outboxes", "server_key", "sockets")

    def __init__(self, link: Link, outboxes: tuple[Outbox, Outbox]) -> None:
        self.link = link
        self.outboxes = outboxes
        self.server_key = b""
        self.by_name: tuple[str, str] | None = None
        self.sockets: list[LoopSocket] = []

    def close(self, linger_ms: int) -> None:
        for socket in self.sockets:
            socket.close(linger_ms)


class Accepted:
    """A connection that a peer has dialed; the ROUTER of each channel knows it by `identity`. `user`: its User-Id."""

    __slots__ = ("identity", "is_cut", "link", "outboxes", "user")

    def __init__(self, link: Link, identity: bytes, user: bytes, outboxes: tuple[Outbox, Outbox]) -> None:
        self.link = link
        self.identity = identity
        self.user = user
        self.is_cut = False
        self.outboxes = outboxes


def new_identity(address: Address) -> bytes:
    return f"{address}#{os.urandom(_NONCE_BYTES).hex()}".encode()


def link_of(identity: bytes) -> Link:
    """The accepted connection that a routing id names; `FROM_NOBODY` if it is not valid."""
    try:
        actor_id, epoch, nonce = identity.decode().split("#")
        link = Link(Address.parse(f"{actor_id}#{epoch}"), dialed=False, nonce=nonce)
    except ValueError:
        return FROM_NOBODY
    # Not, for example, the same epoch written differently: two routing ids must not map to one connection.
    is_plain = f"{link.peer}#{nonce}".encode() == identity
    return link if is_plain and _MIN_NONCE_CHARS <= len(nonce) <= _MAX_NONCE_CHARS else FROM_NOBODY
