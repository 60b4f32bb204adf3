"""Ids, numbers and headers of the messages that one incarnation sends. Pure; owned by `mesh/link/core.py`."""

from collections import deque
from typing import Final

from mesh.address import Address
from mesh.link.outputs import Frames, Output, Send
from mesh.link.peer import UNNUMBERED, Connection, Message, Meta, Phase
from mesh.transport.base import Channel, Link
from mesh.wire.header import PROTOCOL_VERSION, SYSTEM_FLAG, Header, Verb, encode_header

_MAX_WAITING: Final = 1000
"""More than a turn sends in the 2 s until a hello is due; what a peer that never says it can hold here is bounded."""
_HELD: Final = Phase.HELD
# msgspec is slow at encoding enum members.
_NUMBERS: Final = {verb: int(verb) for verb in Verb}


class Outgoing:
    """What `address` sends on all its connections. `outputs` is the one queue of its `LinkCore`."""

    def __init__(self, address: Address) -> None:
        self.outputs: deque[Output] = deque()
        self.address = address
        self._actor_id, self._epoch = address
        self._message_ids = 0

    def next_id(self) -> int:
        """A message id that this incarnation has not used yet."""
        self._message_ids += 1
        return self._message_ids

    def write(
        self, connection: Connection, channel: Channel, verb: Verb, body: bytes, buffers: Frames, meta: Meta, trace: str
    ) -> Frames | None:
        """The frame of a message, to send after `outputs`; empty if it has to wait, None if there is no room."""
        state = connection.channels[channel]
        if state.phase is _HELD:
            # Refuse rather than wait: the sender learns at once, and a peer that never says hello ties up no more.
            if len(state.waiting) >= _MAX_WAITING:
                return None
            # Its sequence number is assigned when it is sent, after the welcome's.
            state.waiting.append((verb, body, buffers, meta, trace))
            return ()
        message_id, correlation_id, timeout_us, flags = meta
        # Assigned at the last moment, so that a waiting frame takes no number before the frames that overtake it.
        state.sent = sequence = state.sent + 1
        header = encode_header(
            Header(
                PROTOCOL_VERSION, _NUMBERS[verb], message_id or self.next_id(), sequence, correlation_id,
                self._actor_id, self._epoch, connection.link.peer.epoch, timeout_us, flags, 0, trace,
            )
        )  # fmt: skip
        # Most messages have no buffers, and building a plain pair is faster than unpacking into a tuple.
        return (header, body, *buffers) if buffers else (header, body)

    def take_back(self, connection: Connection, channel: Channel) -> None:
        """The transport did not take the frame that `write` just returned: its sequence number is free again."""
        connection.channels[channel].sent -= 1

    def say(self, connection: Connection, channel: Channel, *message: *Message) -> None:
        """Queue a message of the link itself behind the outputs that are already pending."""
        parts = self.write(connection, channel, *message)
        if parts:
            self.outputs.append(Send(connection.link, channel, parts))

    def say_unnumbered(self, link: Link, channel: Channel, error: bytes, trace: str) -> None:
        """Queue an error that belongs to no connection: its sequence number is 0."""
        ids, epochs = (self.next_id(), UNNUMBERED, 0), (self._actor_id, self._epoch, link.peer.epoch)
        header = Header(PROTOCOL_VERSION, _NUMBERS[Verb.ERROR], *ids, *epochs, 0, SYSTEM_FLAG, 0, trace)
        self.outputs.append(Send(link, channel, (encode_header(header), error)))
