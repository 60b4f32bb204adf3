"""The outputs of `LinkCore`, carried out by `mesh/link/links.py`."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mesh.address import Address, Endpoint
from mesh.errors import FrameRefused
from mesh.link.peer import Connection, Message, Peer
from mesh.transport.base import Buffer, Channel, Link

Frames = Sequence[Buffer]


class Dial(NamedTuple):
    """Dial a connection; its link is `Link(address, dialed=True)`."""

    address: Address
    endpoint: Endpoint


class Send(NamedTuple):
    """Send a frame; if the transport does not take it, call `LinkCore.not_taken`."""

    link: Link
    channel: Channel
    parts: Frames


class Close(NamedTuple):
    """Close a connection without sending anything."""

    link: Link


class Linked(NamedTuple):
    """A connection with an incarnation is up: both its channels have been greeted."""

    peer: Address


class Lost(NamedTuple):
    """An incarnation is gone or cut off; its links have already been forgotten."""

    peer: Peer
    reason: str


class Found(NamedTuple):
    """A later incarnation (`address`) answers at the endpoint of the peer that was dialed."""

    address: Address


class Superseded(NamedTuple):
    """A peer knows a later incarnation of this actor. `is_proved`: it dials that one, and has just proved itself."""

    by: Address
    reason: str
    known_epoch: int
    is_proved: bool = False


class Refused(NamedTuple):
    """A frame was refused, the first with this code from this actor."""

    peer: Address
    refusal: FrameRefused


Output = Dial | Send | Close | Linked | Lost | Found | Superseded | Refused


class Outgoing(Protocol):
    """What handshake and liveness need of their `LinkCore` to send messages of their own."""

    address: Address
    outputs: deque[Output]

    def next_id(self) -> int:
        """A message id that this incarnation has not used yet."""
        ...

    def say(self, connection: Connection, channel: Channel, *message: *Message) -> None:
        """Queue a message of the link itself behind the outputs that are already pending."""
        ...
