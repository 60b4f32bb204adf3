"""What `LinkCore` wants done. Carried out by `mesh/link/links.py`."""

from collections.abc import Sequence
from typing import NamedTuple

from mesh.address import Address, Endpoint
from mesh.errors import FrameRefused
from mesh.link.peer import Peer
from mesh.transport.base import Buffer, Channel, Link

Frames = Sequence[Buffer]


class Dial(NamedTuple):
    """Make a connection; its link is `Link(address, dialed=True)`."""

    address: Address
    endpoint: Endpoint


class Send(NamedTuple):
    """Send a frame; `LinkCore.not_taken` is to be told if the transport does not take it."""

    link: Link
    channel: Channel
    parts: Frames


class Close(NamedTuple):
    """End a connection without a word."""

    link: Link


class Linked(NamedTuple):
    """A connection with an incarnation is up: both its channels are greeted."""

    peer: Address


class Lost(NamedTuple):
    """An incarnation is gone or cut off, and forgotten already."""

    peer: Peer
    reason: str


class Found(NamedTuple):
    """A later incarnation of a peer listens where that was dialed."""

    address: Address


class Superseded(NamedTuple):
    """A peer knows a later incarnation of this actor. `is_proved`: it has just shown who it is, and dials that one."""

    by: Address
    reason: str
    known_epoch: int
    is_proved: bool = False


class Refused(NamedTuple):
    """A frame was refused, the first of its kind from this actor."""

    peer: Address
    refusal: FrameRefused


Output = Dial | Send | Close | Linked | Lost | Found | Superseded | Refused
