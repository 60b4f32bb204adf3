"""Bodies to bytes and back, for one protocol: a union of control messages and a union of hot ones.

Control messages are MessagePack maps and hot ones arrays, so the first byte of a body says which decoder reads it.
Encoders and decoders are made once; an actor class holds one `Codec`, used on the event loop's thread only.
"""

from typing import Any, Final

import msgspec

from mesh.errors import FrameRefused
from mesh.transport.base import Buffer
from mesh.wire.message import HotMessage, Message

_ENCODER: Final = msgspec.msgpack.Encoder()
_SHOWN_BYTES: Final = 200


class Codec:
    """Encodes any message; decodes those of its two unions.

    Args:
        control: a `Message` class or union of them.
        hot: a `HotMessage` class or union of them; None if the protocol has none.
    """

    def __init__(self, control: Any, hot: Any = None) -> None:
        self._control: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(control)
        # Without hot messages an array is refused like any other body of a wrong shape.
        self._hot: msgspec.msgpack.Decoder[Any] = self._control if hot is None else msgspec.msgpack.Decoder(hot)

    def encode(self, message: Message | HotMessage) -> bytes:
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
