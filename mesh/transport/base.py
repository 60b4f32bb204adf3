"""The seam between actors and whatever carries their frames.

Implemented by `zeromq` (between processes) and `simulation` (in one process, with seeded faults or none);
used only by `mesh/system.py`. All calls are made on the event loop's thread, all callbacks come on it.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mesh.address import Address, Endpoint
from mesh.errors import FrameRefused

Buffer = bytes | bytearray | memoryview


class Channel(enum.IntEnum):
    """One pipe is FIFO, so a cancel must not wait behind bulk: control and data travel apart."""

    CONTROL = 0
    DATA = 1


class Link(NamedTuple):
    """One connection to one incarnation of a peer: dialed by us (DEALER) or accepted from it (our ROUTER).

    `nonce` tells accepted connections of the same incarnation apart; empty where only one can be had at a time.
    """

    peer: Address
    dialed: bool
    nonce: str = ""


class Listener(Protocol):
    """What a transport tells the system above it."""

    def on_frames(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> None:
        """A whole multipart message arrived: header, body, buffers. Never called from inside `send`."""
        ...

    def on_refused(self, link: Link, refusal: FrameRefused) -> None:
        """A connection, or a message on `link`, is by somebody who may not: it goes no further."""
        ...

    def on_link_down(self, link: Link, reason: str) -> None:
        """The connection is gone; nothing more comes from it, and what was queued on it may be lost."""
        ...

    def on_some_link_down(self) -> None:
        """A connection that a peer of another host has made is gone; which, shows when something is sent on it."""
        ...


class Transport(Protocol):
    """Moves multipart messages between actors. FIFO per (link, channel); gaps and duplicates are possible."""

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        """Bind both channels and say where. Raises `mesh.errors.BindError`."""
        ...

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        """Begin a connection; frames sent meanwhile wait in the bounded outbox. Never blocks."""
        ...

    def send(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> bool:
        """Queue one message; False if the link is gone or its outbox is full. Memory is lent until sent."""
        ...

    def close_link(self, link: Link) -> None:
        """Forget a connection at once; nothing queued is sent."""
        ...

    async def stop(self) -> None:
        """Close everything; sends what the kernel takes within a short, bounded time."""
        ...
