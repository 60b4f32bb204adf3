"""The header of every message `[header, body, buffer*]`: a MessagePack array; fields never move, new ones are appended.

Written by `mesh/link/core.py`, read by `mesh/wire/codec.py`.
"""

import enum
from typing import Final, NamedTuple

import msgspec

PROTOCOL_VERSION: Final = 7
MIN_PROTOCOL_VERSION: Final = 7
"""A scheduler of version 6 orders prefills with the parts of what a request wants that no other one reads any more: all
of its prompts would be computed where they decode."""


class Verb(enum.IntEnum):
    """The purpose of a message; its number is what crosses the wire. 7 to 10 were streams'; not used again."""

    HELLO = 1
    WELCOME = 2
    TELL = 3
    ASK = 4
    REPLY = 5
    ERROR = 6
    CANCEL = 11
    HEARTBEAT = 12
    SUBSCRIBE = 13
    PUBLISH = 14
    DRAINING = 15
    BYE = 16


SYSTEM_FLAG: Final = 1
"""In `Header.flags`: the body is one of `mesh/wire/frames.py`, not one of the actor's own protocol."""


# One is made for every frame sent or received. It refers only to numbers and text, so it cannot be part of a cycle:
# `gc=False` keeps the collector from tracking it.
class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First part of every message.

    `message_id` is unique per sender epoch; answers carry it as `correlation_id`. `sequence` grows by one per message
    on a connection's channel and is higher on a later connection, see `mesh/link/peer.py`. `timeout_us` is the time
    left until the deadline, because hosts' clocks differ; 0 is none. `position` is 0: streams used it until
    version 3. `trace` is a W3C traceparent or empty.
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
    """Limits on messages sent and received. `max_message_bytes` counts the body and all buffers."""

    max_parts: int = 64
    max_header_bytes: int = 4096
    max_body_bytes: int = 16 << 20
    max_message_bytes: int = 64 << 20


_ENCODER: Final = msgspec.msgpack.Encoder()

encode_header = _ENCODER.encode
