"""Bodies to bytes and back: `Codec` for one protocol, `BodyCodec` for the two that each actor speaks.

A protocol is a union of control messages, which are MessagePack maps, and one of hot messages, which are arrays, so the
first byte of a body says which decoder reads it. Encoders and decoders are made once and used on the event loop's
thread only.
"""

from collections.abc import Sequence
from typing import Any, Final, get_args

import msgspec

from mesh.errors import FrameRefused, TooLarge
from mesh.transport.base import Buffer
from mesh.wire.header import SYSTEM_FLAG, Header, Limits
from mesh.wire.message import HotMessage, Message

AnyMessage = Message | HotMessage

_ENCODER: Final = msgspec.msgpack.Encoder()
_SHOWN_BYTES: Final = 200


class Codec:
    """Encodes any message; decodes those of its two unions.

    Args:
        control: a `Message` class or union of them.
        hot: a `HotMessage` class or union of them; None if the protocol has none.
    """

    def __init__(self, control: Any, hot: Any = None) -> None:
        self.types: frozenset[type] = frozenset(get_args(control) or (control,))
        """Of its control messages."""
        self._control: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(control)
        # Without hot messages an array is refused like any other body of a wrong shape.
        self._hot: msgspec.msgpack.Decoder[Any] = self._control if hot is None else msgspec.msgpack.Decoder(hot)

    def encode(self, message: AnyMessage) -> bytes:
        """The body of `message`. Never fails for a message whose fields hold what their types say."""
        return _ENCODER.encode(message)

    def decode(self, body: Buffer) -> Any:
        """The message in `body`; raises `FrameRefused("bad_body")` if there is none of this protocol."""
        try:
            first = body[0]
            is_array = 0x90 <= first <= 0x9F or first == 0xDC or first == 0xDD
            return (self._hot if is_array else self._control).decode(body)
        except (msgspec.MsgspecError, ValueError, IndexError, OverflowError, RecursionError) as error:
            raise FrameRefused("bad_body", str(error)[:_SHOWN_BYTES] or "an empty body") from error


class BodyCodec:
    """One actor's bodies: its own protocol, or the mesh's. By the class of what is sent, by the flag of what comes."""

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
                f"{type(message).__name__} takes {len(body)} bytes, a body at most {limits.max_body_bytes}: "
                "send what is large as buffers, or in several messages"
            )
        if buffers:
            if len(buffers) > limits.max_parts - 2:
                raise TooLarge(f"{len(buffers)} buffers, a message takes at most {limits.max_parts - 2}")
            size = sum(b.nbytes if isinstance(b, memoryview) else len(b) for b in buffers)
            if size + len(body) > limits.max_message_bytes:
                raise TooLarge(f"{size} bytes of buffers, a message takes at most {limits.max_message_bytes} in all")
        return body, SYSTEM_FLAG if type(message) in self._system.types else 0

    def decode(self, header: Header, body: Buffer) -> Any:
        """The message; raises `FrameRefused("bad_body")`."""
        return (self._system if header.flags & SYSTEM_FLAG else self._own).decode(body)
