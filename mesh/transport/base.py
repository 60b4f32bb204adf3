"""The interface between actors and the transports that carry their frames.

Implemented by `zeromq` (between processes) and `simulation` (in one process, with seeded faults or none);
used only by `mesh/system.py` and `mesh/link/links.py`. All calls and callbacks are made on the event loop's thread.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mesh.address import Address, Endpoint
from mesh.errors import FrameRefused

Buffer = bytes | bytearray | memoryview


class Channel(enum.IntEnum):
    """Control and data travel separately: a pipe is FIFO, and a cancel must not wait behind bulk."""

    CONTROL = 0
    DATA = 1


class Link(NamedTuple):
    """One connection to one incarnation of a peer: dialed by us (DEALER) or accepted from it (our ROUTER).

    `nonce` distinguishes accepted connections of the same incarnation; empty where there can be only one at a time.
    """

    peer: Address
    dialed: bool
    nonce: str = ""


class Listener(Protocol):
    """What a transport tells the system above it."""

    def on_frames(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> None:
        """A complete multipart message arrived: header, body, buffers. Never called from inside `send`."""
        ...

    def on_refused(self, link: Link, refusal: FrameRefused) -> None:
        """The transport refused a connection, or a message on `link`, and passes it no further."""
        ...

    def on_link_down(self, link: Link, reason: str) -> None:
        """The connection is gone; nothing more comes from it, and messages queued on it may be lost."""
        ...

    def on_some_link_down(self) -> None:
        """A connection dialed by a peer on another host is gone; which one shows only when something is sent on it."""
        ...


class Transport(Protocol):
    """Moves multipart messages between actors. FIFO per (link, channel); gaps and duplicates are possible."""

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        """Bind both channels and return where. Raises `mesh.errors.BindError`."""
        ...

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        """Start a connection; frames sent in the meantime wait in the bounded outbox. Never blocks."""
        ...

    def send(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> bool:
        """Queue one message; False if the link is gone or its outbox is full. The memory is lent until it is sent."""
        ...

    def close_link(self, link: Link) -> None:
        """Forget a connection at once; nothing queued is sent."""
        ...

    async def stop(self) -> None:
        """Close everything; still sends what the kernel accepts within a short, bounded time."""
        ...
