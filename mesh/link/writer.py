"""Frames that go out: numbered, encoded, and held where no hello has come yet. Owned by `mesh/link/core.py`."""

from typing import Final

from mesh.address import Address
from mesh.link.outputs import Frames
from mesh.link.peer import UNNUMBERED, Connection, Meta, Phase
from mesh.transport.base import Channel
from mesh.wire.header import PROTOCOL_VERSION, SYSTEM_FLAG, Header, Verb, encode_header

_MAX_WAITING: Final = 1000
_HELD: Final = Phase.HELD
# msgspec encodes a member of an enumeration slowly.
_NUMBERS: Final = {verb: int(verb) for verb in Verb}


class FrameWriter:
    """Of one incarnation."""

    def __init__(self, address: Address) -> None:
        self._actor_id, self._epoch = address
        self._message_ids = 0

    def next_id(self) -> int:
        """A message id that this incarnation has not used."""
        self._message_ids += 1
        return self._message_ids

    def write(
        self, connection: Connection, channel: Channel, verb: Verb, body: bytes, buffers: Frames, meta: Meta, trace: str
    ) -> Frames | None:
        """The frame of a message, to go after the core's outputs; empty if it has to wait, None if there is no room."""
        state = connection.channels[channel]
        if state.phase is _HELD:
            # Refused, not waited for: whoever sends finds out now, and a peer that never greets holds no more than
            # this.
            if len(state.waiting) >= _MAX_WAITING:
                return None
            # It gets its number when it goes: after the welcome's.
            state.waiting.append((verb, body, buffers, meta, trace))
            return ()
        message_id, correlation_id, timeout_us, flags, position = meta
        # Counted here, at the last moment: frames that wait take no number before those that overtake them.
        state.sent = sequence = state.sent + 1
        header = encode_header(
            Header(
                PROTOCOL_VERSION, _NUMBERS[verb], message_id or self.next_id(), sequence, correlation_id,
                self._actor_id, self._epoch, connection.link.peer.epoch, timeout_us, flags, position, trace,
            )
        )  # fmt: skip
        return (header, body, *buffers) if buffers else (header, body)

    def take_back(self, connection: Connection, channel: Channel) -> None:
        """The frame that `write` has just returned was not taken: its number is free again."""
        connection.channels[channel].sent -= 1

    def unnumbered(self, receiver: Address, verb: Verb, trace: str) -> bytes:
        """The header of a system message that belongs to no connection."""
        ids, epochs = (self.next_id(), UNNUMBERED, 0), (self._actor_id, self._epoch, receiver.epoch)
        return encode_header(Header(PROTOCOL_VERSION, _NUMBERS[verb], *ids, *epochs, 0, SYSTEM_FLAG, 0, trace))
