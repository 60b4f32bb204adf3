"""Decodes headers, encodes and decodes bodies: `open_envelope`, `Codec` for one protocol, `BodyCodec` for the two that
each actor speaks.

A protocol is a union of control messages, which are MessagePack maps, and a union of hot messages, which are arrays, so
the first byte of a body selects the decoder. Encoders and decoders are made once and used on the event loop's thread
only.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from mesh.errors import FrameRefused, TooLarge
from mesh.transport.base import Buffer
from mesh.wire.header import PROTOCOL_VERSION, SYSTEM_FLAG, Header, Limits, Verb
from mesh.wire.message import HotMessage, Message

AnyMessage = Message | HotMessage

_ENCODER: Final = msgspec.msgpack.Encoder()
_HEADERS: Final = msgspec.msgpack.Decoder(Header)
_SHOWN_BYTES: Final = 200
"""Enough for msgspec's own texts with a path; the rest is what a stranger has sent."""


class Codec:
    """Encodes any message; decodes those of its unions (`hot` None: it has no hot ones).

    `senders`: which roles may send a message from other hosts; any may send one not named, such as an answer.
    """

    def __init__(self, control: Any, hot: Any = None, senders: Mapping[type, Collection[str]] | None = None) -> None:
        self.senders = senders or {}
        self.types: frozenset[type] = frozenset(get_args(control) or (control,))
        """The classes of its control messages."""
        self._control: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(control)
        # Without hot messages an array is refused like any other body of the wrong shape.
        self._hot: msgspec.msgpack.Decoder[Any] = self._control if hot is None else msgspec.msgpack.Decoder(hot)

    def encode(self, message: AnyMessage) -> bytes:
        """The body of `message`. Never fails for a message whose fields match their types."""
        return _ENCODER.encode(message)

    def decode(self, body: Buffer) -> Any:
        """The message in `body`; raises `FrameRefused("bad_body")` if it is not one of this protocol."""
        try:
            first = body[0]
            # MessagePack's arrays: up to 15 elements, 16-bit length, 32-bit length.
            is_array = 0x90 <= first <= 0x9F or first == 0xDC or first == 0xDD
            return (self._hot if is_array else self._control).decode(body)
        except (msgspec.MsgspecError, ValueError, IndexError, OverflowError, RecursionError) as error:
            # The error text quotes an unknown tag in full: a stranger must not fill logs and answers with it.
            raise FrameRefused("bad_body", str(error)[:_SHOWN_BYTES] or "the body is empty") from error


class BodyCodec:
    """One actor's bodies, of its own protocol or the mesh's: by class when sending, by header flag when receiving."""

    def __init__(self, own: Codec, system: Codec, limits: Limits) -> None:
        self._own = own
        self._system = system
        self._limits = limits

    def encode(self, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> tuple[bytes, int]:
        """The body, and the flags that go into its header; raises `TooLarge`."""
        body = _ENCODER.encode(message)
        limits = self._limits
        if len(body) > limits.max_body_bytes:
            raise TooLarge(
                f"{type(message).__name__} is {len(body)} bytes, a body may have at most {limits.max_body_bytes}: "
                "send large data as buffers, or split the message"
            )
        if buffers:
            if len(buffers) > limits.max_parts - 2:
                raise TooLarge(f"{len(buffers)} buffers; a message may have at most {limits.max_parts - 2}")
            size = sum(b.nbytes if isinstance(b, memoryview) else len(b) for b in buffers)
            if size + len(body) > limits.max_message_bytes:
                raise TooLarge(f"{size} bytes of buffers; a message may have at most {limits.max_message_bytes} in all")
        return body, SYSTEM_FLAG if type(message) in self._system.types else 0

    def decode(self, header: Header, body: Buffer) -> Any:
        """The message; raises `FrameRefused("bad_body")`."""
        return (self._system if header.flags & SYSTEM_FLAG else self._own).decode(body)


def open_envelope(parts: Sequence[Buffer]) -> Header:
    """The header of a message; raises `FrameRefused`. Neither it nor the other parts are checked against limits here.

    The sender of an oversized message is told so in answer to that very message, so the header is read first.
    """
    if len(parts) < 2:
        raise FrameRefused("bad_header", f"a header and a body were expected, but the message has {len(parts)} parts")
    try:
        header = _HEADERS.decode(parts[0])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise FrameRefused("bad_header", str(error)) from error
    # A hello's body says which versions its sender speaks; the handshake checks whether any is in common.
    if header.version != PROTOCOL_VERSION and header.verb != Verb.HELLO:
        raise FrameRefused("wrong_version", f"protocol version {header.version} instead of {PROTOCOL_VERSION}")
    return header


def check_sizes(parts: Sequence[Buffer], limits: Limits) -> None:
    """Raise `FrameRefused` if a message `[header, body, buffer*]` is too large or has too many parts."""
    if len(parts) > limits.max_parts:
        raise FrameRefused("too_many_parts", f"the message has {len(parts)} parts; the maximum is {limits.max_parts}")
    if len(parts[0]) > limits.max_header_bytes:
        text = f"the header has {len(parts[0])} bytes; the maximum is {limits.max_header_bytes}"
        raise FrameRefused("too_large", text)
    size = len(parts[1])
    if size > limits.max_body_bytes:
        raise FrameRefused("too_large", f"the body has {size} bytes; the maximum is {limits.max_body_bytes}")
    for buffer in parts[2:]:
        size += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
    if size > limits.max_message_bytes:
        raise FrameRefused("too_large", f"the message has {size} bytes; the maximum is {limits.max_message_bytes}")
