"""The envelope of every message: parts `[header, body, buffer*]`, and what is refused before anything is decoded.

The header is one MessagePack array whose fields never move and are only ever appended to. Used by `mesh/link/links.py`.
"""

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from mesh.errors import FrameRefused
from mesh.transport.base import Buffer

PROTOCOL_VERSION: Final = 2
MIN_PROTOCOL_VERSION: Final = 2


class Verb(enum.IntEnum):
    """What a message is for; the number is what crosses the wire."""

    HELLO = 1
    WELCOME = 2
    TELL = 3
    ASK = 4
    REPLY = 5
    ERROR = 6
    STREAM = 7
    ITEM = 8
    END = 9
    CREDIT = 10
    CANCEL = 11
    HEARTBEAT = 12
    SUBSCRIBE = 13
    PUBLISH = 14
    DRAINING = 15
    BYE = 16


SYSTEM_FLAG: Final = 1
"""In `Header.flags`: the body is one of `mesh/wire/frames.py`, not of the actor's own protocol."""


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First part of every message.

    `message_id` is unique per sender epoch; answers carry it as `correlation_id`. `sequence` grows by one per message
    on a connection's channel and is higher on a later connection, see `mesh/link/peer.py`. `timeout_us` is what is
    left until the deadline, because hosts' clocks differ; 0 is none. `position` is the first credit limit in `stream`,
    the index of the item in `item`, and their number in `end`. `trace` is a W3C traceparent or empty.
    """

    version: int
    verb: int
    message_id: int
    sequence: int
    correlation_id: int
    sender: str
    sender_epoch: int
    receiver_epoch: int
    timeout_us: int = 0
    flags: int = 0
    position: int = 0
    trace: str = ""


class Limits(NamedTuple):
    """Largest message that is sent or taken. `max_message_bytes` counts all parts."""

    max_parts: int = 64
    max_header_bytes: int = 4096
    max_body_bytes: int = 16 << 20
    max_message_bytes: int = 64 << 20


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Header)

encode_header = _ENCODER.encode


def open_envelope(parts: Sequence[Buffer]) -> Header:
    """The header of a message; raises `FrameRefused`. It is not checked against limits, nor are the other parts.

    Who has sent too much is told so in answer to that very message, so its header is read first.
    """
    if len(parts) < 2:
        raise FrameRefused("bad_header", f"{len(parts)} parts where header and body are expected")
    try:
        header = _DECODER.decode(parts[0])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise FrameRefused("bad_header", str(error)) from error
    if header.version != PROTOCOL_VERSION and header.verb != Verb.HELLO:
        raise FrameRefused("wrong_version", f"protocol version {header.version}")
    return header


def check_sizes(parts: Sequence[Buffer], limits: Limits) -> None:
    """Raise `FrameRefused` if a message `[header, body, buffer*]` is too large, or has too many parts."""
    if len(parts) > limits.max_parts:
        raise FrameRefused("too_many_parts", f"{len(parts)} parts, at most {limits.max_parts} are taken")
    if len(parts[0]) > limits.max_header_bytes:
        text = f"a header of {len(parts[0])} bytes, at most {limits.max_header_bytes} are taken"
        raise FrameRefused("too_large", text)
    size = len(parts[1])
    if size > limits.max_body_bytes:
        raise FrameRefused("too_large", f"a body of {size} bytes, at most {limits.max_body_bytes} are taken")
    for buffer in parts[2:]:
        size += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
    if size > limits.max_message_bytes:
        raise FrameRefused("too_large", f"a message of {size} bytes, at most {limits.max_message_bytes} are taken")
