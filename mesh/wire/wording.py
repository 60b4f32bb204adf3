"""Which of two codecs a body is in: the mesh's own frames, or the protocol of the actor. Used by all of `mesh/`."""

from collections.abc import Sequence
from typing import Any

from mesh.actor import AnyMessage
from mesh.errors import TooLarge
from mesh.transport.base import Buffer
from mesh.wire.codec import Codec
from mesh.wire.frames import SYSTEM_CODEC, SYSTEM_TYPES
from mesh.wire.header import SYSTEM_FLAG, Header, Limits


class Wording:
    """Encodes by the class of the message, decodes by the header's flag."""

    def __init__(self, codec: Codec, limits: Limits) -> None:
        self._codec = codec
        self._limits = limits

    def encode(self, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> tuple[bytes, int]:
        """The body, and the flags that go into its header; raises `TooLarge`."""
        body = self._codec.encode(message)
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
        return body, SYSTEM_FLAG if type(message) in SYSTEM_TYPES else 0

    def decode(self, header: Header, body: Buffer) -> Any:
        """The message; raises `FrameRefused`."""
        return (SYSTEM_CODEC if header.flags & SYSTEM_FLAG else self._codec).decode(body)
