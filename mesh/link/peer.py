"""What an actor remembers of a peer and of the one or two links with it. Owned by `mesh/link/links.py`."""

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mesh.address import Address
from mesh.link.sequence import IncomingSequence, OutgoingSequence, connection_of
from mesh.transport.base import Buffer, Link
from mesh.wire.header import SYSTEM_FLAG

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from mesh.membership.view import Member


class Wire:
    """One link's numbering and state. `waiting` holds what goes to an accepted lane that has not said hello yet."""

    __slots__ = ("greeted", "hello_timer", "incoming", "is_self", "link", "outgoing", "peer", "said_bye", "waiting")

    def __init__(self, link: Link, peer: "Peer", connection: int, remote_connection: int = 0) -> None:
        self.link = link
        self.peer = peer
        self.outgoing = (OutgoingSequence(connection), OutgoingSequence(connection))
        self.incoming = (IncomingSequence(remote_connection), IncomingSequence(remote_connection))
        self.greeted = [False, False]
        self.is_self = False
        self.said_bye = [False, False]
        self.waiting: tuple[deque[Sequence[Buffer]], deque[Sequence[Buffer]]] = (deque(), deque())
        self.hello_timer: asyncio.TimerHandle | None = None


class Peer:
    """One incarnation that this actor has a link with.

    `path` is where messages to it go, `is_watched` says that its life signs are waited for, `num_heard` counts its
    messages by lane.
    """

    __slots__ = ("accepted", "address", "capabilities", "dialed", "is_watched", "member", "num_heard", "path")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.member: Member | None = None
        self.capabilities: dict[str, Any] = {}
        self.dialed: Wire | None = None
        self.accepted: Wire | None = None
        self.path: Wire | None = None
        self.is_watched = False
        self.num_heard = [0, 0]

    def is_older_than(self, connection: int) -> bool:
        """Whether a link is of a time before the peer's connection number `connection`."""
        for wire in (self.accepted, self.dialed):
            if wire is not None and any(0 < connection_of(n.last) < connection for n in wire.incoming):
                return True
        return False


class Meta(NamedTuple):
    """The fields of a header that callers choose."""

    message_id: int = 0
    correlation_id: int = 0
    timeout_us: int = 0
    flags: int = 0
    position: int = 0


PLAIN: Final = Meta()
SYSTEM: Final = Meta(flags=SYSTEM_FLAG)
