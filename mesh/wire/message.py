"""The base classes of all messages between actors.

A message is one tagged msgspec Struct, MessagePack on the wire. Fields are append-only with defaults and unknown
fields are ignored, so an older peer can read a newer frame. Used by `mesh/wire/frames.py`, `kvstore/protocol.py`,
`nodes/protocol/` and `cli/protocol.py` (supervisors), which together define everything on the wire.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A control message: a MessagePack map, readable by any peer without a schema."""


class HotMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """A per-step message: a MessagePack array, a third of a map's size and time. Fields never move."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A nested piece of a `Message`."""


class HotPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A nested piece of a `HotMessage`. Fields never move."""
