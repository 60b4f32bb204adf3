"""The state kept for a peer and for the one or two connections with it. Owned by `mesh/link/core.py`.

Sequence numbers reveal repeats and gaps, since a transport rules out neither. The upper half counts the sender's
connections, the lower half the messages on one channel of one of them. One sender's numbers only grow, so a late
message from an older connection counts as a repeat, and a connection that has started over is noticed.
"""

import enum
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mesh.address import Address
from mesh.transport.base import Buffer, Channel, Link
from mesh.wire.header import SYSTEM_FLAG, Header, Verb

if TYPE_CHECKING:
    from mesh.membership.view import Member

UNNUMBERED: Final = 0
"""Sequence number of an error about a connection that its sender has no record of."""
_SHIFT: Final = 32
"""Half of a 64-bit number: 4 billion messages on a connection, which at 150,000 a second (measured) last 8 hours."""


class Meta(NamedTuple):
    """The header fields that callers choose."""

    message_id: int = 0
    correlation_id: int = 0
    timeout_us: int = 0
    flags: int = 0


PLAIN: Final = Meta()
SYSTEM: Final = Meta(flags=SYSTEM_FLAG)


def answer_to(header: Header) -> Meta:
    return Meta(correlation_id=header.message_id, flags=SYSTEM_FLAG)


class Phase(enum.Enum):
    """The phase of one channel of a connection; see the table in `mesh/link/core.py`."""

    HELD = enum.auto()
    GREETING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


Message = tuple[Verb, bytes, Sequence[Buffer], Meta, str]
"""Verb, body, buffers, rest of the header and trace of a message; it gets its sequence number when it is sent."""


class ChannelState:
    """One channel of a connection: its phase, the last numbers sent and received, and messages that wait while held."""

    __slots__ = ("phase", "received", "sent", "waiting")

    def __init__(self, phase: Phase, number: int, remote: int) -> None:
        self.phase = phase
        self.sent = number << _SHIFT
        self.received = remote << _SHIFT
        self.waiting: deque[Message] = deque()


def connection_of(sequence: int) -> int:
    return sequence >> _SHIFT


class Connection:
    """One connection: number `number` in this actor's count, `remote` in the peer's (0 until the peer sends on it)."""

    __slots__ = ("channels", "link", "peer", "remote")

    def __init__(self, link: Link, peer: "Peer", number: int, remote: int) -> None:
        self.link = link
        self.peer = peer
        # The dialing end says hello first; the accepting end must not send before it knows who has dialed.
        phase = Phase.GREETING if link.dialed else Phase.HELD
        self.remote = remote
        self.channels = ChannelState(phase, number, remote), ChannelState(phase, number, remote)

    @property
    def is_up(self) -> bool:
        return all(channel.phase in (Phase.OPEN, Phase.CLOSED) for channel in self.channels)


class Peer:
    """One incarnation that this actor has a link with. `route` is where messages to it go; None once it is lost.

    `member` is how it introduced itself when the link was made, `is_proved` whether it proved that it belongs to this
    host's supervisor. `is_watched`: heartbeats are expected from it until it is lost. `refusal` is the code with which
    it ended the link, if it did.
    `pings` holds the unanswered pings: by channel the message id, and the value of `heard` when it was sent.
    """

    __slots__ = (
        "address", "connections", "heard_by_beat", "is_proved", "is_watched", "member", "pings", "refusal", "route",
        "silent_beats",
    )  # fmt: skip

    def __init__(self, address: Address) -> None:
        self.address = address
        self.member: Member | None = None
        self.connections: list[Connection] = []
        self.route: Connection | None = None
        self.is_proved = False
        self.is_watched = False
        self.refusal = ""
        self.heard_by_beat = -1
        self.silent_beats = 0
        self.pings: dict[Channel, tuple[int, int]] = {}

    @property
    def was_heard(self) -> bool:
        return any(map(self.heard, Channel))

    def heard(self, channel: Channel) -> int:
        """A number that grows with every message received on a channel; its start is arbitrary."""
        return sum(connection.channels[channel].received for connection in self.connections)
