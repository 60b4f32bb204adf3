"""All links of one actor: frames, connection events and time in; frames, messages, events and a deadline out. Pure.

A connection is dialed by this actor or accepted from a peer; a peer has at most one of each, and messages to it take
one of them, its route, while that lives. A connection has two channels (control, data), and each of them a phase:

    phase      channel of a dialed connection                    channel of an accepted connection
    HELD                                                      no hello yet: messages wait, 1,000 at most
    GREETING   hello sent: messages follow it at once
    OPEN       welcome came                                   hello came: welcome sent, then what waited
    CLOSED     bye came, nothing follows                      the same

    what happens                 without a link with that incarnation      with one
    a message is to be sent      dial, hello on both channels                 it goes on the route
    hello                        accept; if an older epoch is linked it    of a later connection than known: lost,
                                 is lost, if a newer: `superseded`; with   and accepted anew
                                 a wrong proof, or none: refused
    welcome on both channels        refused                                   the dial is done; of two connections: lost
    bye on both channels            nothing                                   lost
    error with number 0          refused                                   lost
    any other frame              refused, `no_hello`                       delivered; dropped if its number is not above
                                                                           the last of its channel
    suspected                    nothing                                   ping on both channels; one stays silent: lost
    a later epoch answers there                                            dialed: it is found, and the older lost
    connection down              nothing                                   lost; so without a welcome in time, and when
                                                                           a peer that is watched falls silent

Who is lost is forgotten whole, with both connections; the next message dials again, after a pause if the dial before
led to no welcome. Invariants under any order of these (`tests/mesh/link/test_core.py`):
1. Each connection is one of its peer's two; the route is one of them, and does not change before the peer is lost.
2. Numbers sent on a channel of a connection grow by one.
3. What is delivered of a connection on a channel was sent in that order, by one incarnation, each message once.
4. A peer is lost once, and nothing of it is delivered afterwards.
5. A dialed connection that is not up has a deadline, and so has each ping.
6. Who is found is a later incarnation of the peer that was dialed, and that is lost.

Driven by `mesh/link/links.py`.
"""

from collections import deque
from typing import Final

from mesh.address import Address
from mesh.errors import PROOF_CODES, SUPERSEDED, TOO_MANY_PEERS, WRONG_EPOCH, FrameRefused, Unreachable
from mesh.link.handshake import WELCOME, Handshake
from mesh.link.liveness import Liveness
from mesh.link.outputs import Close, Dial, Found, Frames, Lost, Output, Refused, Send, Superseded
from mesh.link.peer import SYSTEM, UNNUMBERED, Connection, Message, Meta, Peer, Phase, answer_to, connection_of
from mesh.link.refusals import TOLD, LogOnce, error_body, is_answered, later_incarnation
from mesh.membership.view import Directory
from mesh.options import SystemOptions
from mesh.runtime.deadlines import Deadlines
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Channel, Link
from mesh.wire.codec import check_sizes, open_envelope
from mesh.wire.frames import SYSTEM_CODEC, Bye, ErrorBody
from mesh.wire.header import (
    PROTOCOL_VERSION,
    SYSTEM_FLAG,
    Header,
    Verb,
    encode_header,
)

_LINK_VERBS: Final = frozenset((Verb.HELLO, Verb.WELCOME, Verb.BYE))
_OTHERS: Final = frozenset(("wrong_sender", *PROOF_CODES))
_ANSWERS: Final = frozenset((Verb.REPLY, Verb.ERROR))
_MAX_WAITING: Final = 1000
_HELD: Final = Phase.HELD
# msgspec encodes a member of an enumeration slowly.
_NUMBERS: Final = {verb: int(verb) for verb in Verb}


class LinkCore:
    """The links of one incarnation. Whoever calls a method then carries out `outputs`, oldest first."""

    def __init__(self, address: Address, options: SystemOptions, metrics: Metrics, directory: Directory) -> None:
        self.outputs: deque[Output] = deque()
        self.peers: dict[str, Peer] = {}
        self.address = address
        self._actor_id, self._epoch = address
        self._options = options
        self._max_header_bytes = options.limits.max_header_bytes
        self._max_body_bytes = options.limits.max_body_bytes
        self._metrics = metrics
        self._locate = directory.locate
        self._connections: dict[Link, Connection] = {}
        self._deadlines = Deadlines()
        self._log_once = LogOnce()
        self._now = 0.0
        self._num_connections = self._message_ids = 0
        self.next_deadline = self._deadlines.next
        self.liveness = Liveness(self, options, metrics, self._deadlines)
        self._handshake = Handshake(self, options, directory, self._deadlines)

    # From the actor

    def dial(self, actor_id: str, now: float, trace: str) -> Peer:
        """Begin a link with an actor that is not in `peers`; raises `Unreachable`."""
        if actor_id == self._actor_id:
            return self._connect(Link(self.address, dialed=True)).peer
        located = self._locate(actor_id)
        if located is None:
            raise Unreachable(f"{actor_id} is not a member of the mesh")
        address, endpoint = located
        self._handshake.check_pause(address, now)
        if len(self.peers) >= self._options.max_peers:
            raise Unreachable(f"{self._options.max_peers} peers are linked already")
        self._now = now
        self.outputs.append(Dial(address, endpoint))
        connection = self._connect(Link(address, dialed=True))
        self._handshake.begin(connection, now, trace)
        return connection.peer

    def lose(self, address: Address, reason: str, keep: Link | None = None) -> None:
        """Forget an incarnation and tell of it; nothing happens if it is not linked. `keep` is not closed."""
        peer = self.peers.get(address.actor_id)
        if peer is None or peer.address != address:
            return
        self._forget(peer)
        self._log_once.link_ended(address)
        for connection in peer.connections:
            if address != self.address and connection.link != keep:
                self.outputs.append(Close(connection.link))
        self._metrics.count("mesh_peers_lost_total")
        self.outputs.append(Lost(peer, reason))

    def close(self) -> None:
        """Say bye to everybody and forget them; nobody is lost."""
        body = SYSTEM_CODEC.encode(Bye())
        for peer in list(self.peers.values()):
            # A link of an actor with itself has nobody at its other end who would have to hear it.
            if peer.route is not None and peer.address != self.address:
                for channel in Channel:
                    self.say(peer.route, channel, Verb.BYE, body, (), SYSTEM, "")
            self._forget(peer)

    def next_id(self) -> int:
        """A message id that this incarnation has not used."""
        self._message_ids += 1
        return self._message_ids

    def write(
        self, connection: Connection, channel: Channel, verb: Verb, body: bytes, buffers: Frames, meta: Meta, trace: str
    ) -> Frames | None:
        """The frame of a message, to go after `outputs`; empty if it has to wait, None if there is no room."""
        state = connection.channels[channel]
        if state.phase is _HELD:
            # Refused, not waited for: whoever sends finds out now, and who never greets holds no more than this.
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
        # Most messages have no buffers, and a tuple of two is made faster than one that is unpacked into.
        return (header, body, *buffers) if buffers else (header, body)

    def take_back(self, connection: Connection, channel: Channel) -> None:
        """The frame that `write` has just returned was not taken: its number is free again."""
        connection.channels[channel].sent -= 1

    # From the network

    def receive(self, link: Link, channel: Channel, parts: Frames) -> tuple[Peer, Header] | None:
        """A frame came; who sent it and its header if it is to be delivered, and then there are no new `outputs`."""
        header: Header | None = None
        try:
            header = open_envelope(parts)
            # Compared here as well, since most frames are of two small parts and need no more.
            if len(parts) > 2 or len(parts[0]) > self._max_header_bytes or len(parts[1]) > self._max_body_bytes:
                check_sizes(parts, self._options.limits)
            if header.receiver_epoch != self._epoch:
                self._note_successor(link, header, parts)
                raise FrameRefused(WRONG_EPOCH, f"epoch {self._epoch} listens here", known_epoch=self._epoch)
            if link.peer != (header.sender, header.sender_epoch):
                self._from_another(link, header, parts)
                return None
            connection = self._connections.get(link)
            if connection is None:
                if header.verb == Verb.BYE:
                    # It is lost already, by the registry's word for example; but the transport has just met it anew.
                    self.outputs.append(Close(link))
                    return None
                connection = self._accept(link, header, parts)
            state = connection.channels[channel]
            if header.sequence == state.received + 1:
                state.received = header.sequence
            else:
                connection = self._out_of_order(connection, channel, header, parts)
                if connection is None:
                    return None
            peer = connection.peer
            if header.verb in _LINK_VERBS:
                self._on_link_verb(connection, channel, header, parts)
                return None
            if peer.pings and header.verb in _ANSWERS and header.correlation_id == peer.pings.get(channel, (0,))[0]:
                self.liveness.end_ping(peer, channel)
                return None
        except FrameRefused as refusal:
            self.refuse(link, channel, header, refusal)
            return None
        return peer, header

    def refuse(self, link: Link, channel: Channel, header: Header | None, refusal: FrameRefused) -> None:
        """A frame is none, or not for here; `header` is None where it could not be read."""
        self._metrics.count("mesh_frames_refused_total", code=refusal.code)
        if self._log_once.is_new(link.peer, refusal, self._now):
            self.outputs.append(Refused(link.peer, refusal))
        connection = self._connections.get(link)
        if refusal.code in _OTHERS and link.dialed and connection is not None:
            self._fail(connection, "another actor listens there")
            return
        located = self._locate(link.peer.actor_id)
        is_member = located is not None and located[0] == link.peer
        is_linked = connection is not None
        if header is not None and is_answered(header, refusal, is_linked=is_linked, is_member=is_member):
            body = error_body(refusal)
            if connection is not None:
                self.say(connection, channel, Verb.ERROR, body, (), answer_to(header), header.trace)
            else:
                self.outputs.append(Send(link, channel, (self._unnumbered_error(link.peer, header.trace), body)))
        if connection is None:
            self.outputs.append(Close(link))

    def not_taken(self, output: Send) -> None:
        """An outbox is full. Who takes nothing is slow, and not silent: its transport says when it is gone."""
        self._metrics.count("mesh_outbox_full_total")
        connection = self._connections.get(output.link)
        if connection is not None:
            self.liveness.end_ping(connection.peer, output.channel)

    def down(self, link: Link, reason: str, now: float) -> None:
        """A connection is gone, and with it the incarnation as far as this actor can tell."""
        connection = self._connections.get(link)
        self._now = now
        if connection is not None:
            self._fail(connection, reason)

    # By the clock

    def beat(self, now: float) -> None:
        """Called every heartbeat."""
        # What comes without a time, a refusal say, begins a pause before the next dial now, and not when it was dialed.
        self._now = now
        self.liveness.beat(now)

    def due(self, now: float) -> None:
        """What has not come in time."""
        self._now = now
        while (key := self._deadlines.pop_due(now)) is not None:
            kind, actor_id = key
            peer = self.peers[actor_id]
            if kind == WELCOME:
                self.down(Link(peer.address, dialed=True), "no welcome to hello", now)
            else:
                self.liveness.due(peer, Channel[kind])

    # Parts of these

    def _accept(self, link: Link, header: Header, parts: Frames) -> Connection:
        """A connection that a peer has made begins; only a hello begins one.

        A peer dials only when it has no record of this actor, or has lost it. So a link with it from before, accepted
        from it or dialed and welcomed by it under a lower connection number, is one that the peer has forgotten.
        """
        if header.verb != Verb.HELLO or link.dialed:
            raise FrameRefused("no_hello", "a message without hello before it")
        # Before anybody is lost: whoever takes another's name must not end that one.
        self._handshake.vet_hello(link.peer, parts)
        address, number = link.peer, connection_of(header.sequence)
        peer = self.peers.get(address.actor_id)
        located = self._locate(address.actor_id) if peer is None else None
        newest = peer.address.epoch if peer is not None else located[0].epoch if located is not None else 0
        if newest > address.epoch:
            endpoint = located[1] if located is not None else peer.member.endpoint if peer and peer.member else None
            where = f", at {endpoint.control}" if endpoint is not None else ""
            raise FrameRefused(SUPERSEDED, f"{address} says hello, epoch {newest} is known{where}", known_epoch=newest)
        if address.actor_id in ("", self._actor_id):
            raise FrameRefused(WRONG_EPOCH, f"{address} says hello to {self.address}")
        connections = peer.connections if peer is not None else []
        if peer is not None and newest < address.epoch:
            self.lose(peer.address, f"replaced by epoch {address.epoch}")
        elif link in self._connections or any(0 < connection.remote < number for connection in connections):
            self.lose(address, "it has begun again", keep=link)
        elif any(not connection.link.dialed for connection in connections):
            # The hello of a connection that its peer has given up, and that was overtaken by the one after it.
            raise FrameRefused("no_hello", "a later connection of this incarnation is known")
        if address.actor_id not in self.peers and len(self.peers) >= self._options.max_peers:
            raise FrameRefused(TOO_MANY_PEERS, f"{self._options.max_peers} peers are linked already")
        return self._connect(link, number)

    def _from_another(self, link: Link, header: Header, parts: Frames) -> None:
        """A frame of somebody else than its link is with: only a successor's word is news, the rest is refused."""
        successor = later_incarnation(link.peer, header, parts) if link.dialed else None
        if successor is None:
            raise FrameRefused("wrong_sender", f"says it is {header.sender}#{header.sender_epoch}")
        connection = self._connections.get(link)
        if connection is not None:
            self.outputs.append(Found(successor))
            self._fail(connection, f"epoch {successor.epoch} listens there")

    def _note_successor(self, link: Link, header: Header, parts: Frames) -> None:
        """A frame is for another incarnation of this actor: if a later one, who dials it knows of that."""
        if header.verb == Verb.HELLO and header.receiver_epoch > self._epoch and not link.dialed:
            is_proved = self._handshake.vet_hello(link.peer, parts)
            reason = f"{link.peer} dials epoch {header.receiver_epoch} of this actor"
            self.outputs.append(Superseded(link.peer, reason, header.receiver_epoch, is_proved))

    def _connect(self, link: Link, remote: int = 0) -> Connection:
        self._num_connections += 1
        peer = self.peers.setdefault(link.peer.actor_id, Peer(link.peer))
        connection = self._connections[link] = Connection(link, peer, self._num_connections, remote)
        peer.connections.append(connection)
        peer.route = peer.route or connection
        return connection

    def _forget(self, peer: Peer) -> None:
        del self.peers[peer.address.actor_id]
        peer.route = None
        for connection in peer.connections:
            del self._connections[connection.link]
        for kind in (WELCOME, *(channel.name for channel in peer.pings)):
            self._deadlines.clear((kind, peer.address.actor_id))

    def _out_of_order(
        self, connection: Connection, channel: Channel, header: Header, parts: Frames
    ) -> Connection | None:
        """The connection of a frame that is not the next of its channel; None if the frame goes no further."""
        sequence, last = header.sequence, connection.channels[channel].received
        remote, number = connection.remote, connection_of(sequence)
        if sequence == UNNUMBERED and header.verb == Verb.ERROR:
            body = SYSTEM_CODEC.decode(parts[1])
            error = body if isinstance(body, ErrorBody) else ErrorBody(code="refused", message="")
            if error.code == SUPERSEDED:
                self.outputs.append(Superseded(connection.link.peer, error.message, error.known_epoch))
            told = FrameRefused(error.code, f"it says: {error.message}")
            if error.code in TOLD and self._log_once.is_new(connection.link.peer, told, self._now):
                self.outputs.append(Refused(connection.link.peer, told))
            self._fail(connection, f"the peer refuses the link ({error.code}: {error.message})")
            return None
        # Sent twice by the network, or late: of a connection that another has followed.
        if sequence <= last or number < remote:
            self._metrics.count("mesh_frames_repeated_total")
            return None
        if number == remote:
            if last:
                self._metrics.count("mesh_frames_missing_total", sequence - last - 1)
        elif not connection.link.dialed:
            connection = self._accept(connection.link, header, parts)
        elif remote:
            # It has answered a hello of before, or has forgotten this connection and taken it for another.
            self.lose(connection.link.peer, "it has begun again")
            return None
        connection.remote = number
        connection.channels[channel].received = sequence
        return connection

    def _on_link_verb(self, connection: Connection, channel: Channel, header: Header, parts: Frames) -> None:
        if header.verb != Verb.BYE:
            self._handshake.greeted(connection, channel, header, parts)
            return
        # Bulk may still be on its way when the control channel says bye; the peer is gone when both have said it.
        connection.channels[channel].phase = Phase.CLOSED
        if all(state.phase is Phase.CLOSED for state in connection.channels):
            self.lose(connection.link.peer, "it said bye")
        self._handshake.end_if_up(connection)

    def _fail(self, connection: Connection, reason: str) -> None:
        """A connection has ended, or never was one; if that, the core was told the time when it was dialed."""
        self._handshake.failed(connection, self._now)
        self.lose(connection.link.peer, reason)

    def say(self, connection: Connection, channel: Channel, *message: *Message) -> None:
        """Have a message of the link's own go out after what is wanted already."""
        parts = self.write(connection, channel, *message)
        if parts:
            self.outputs.append(Send(connection.link, channel, parts))

    def _unnumbered_error(self, receiver: Address, trace: str) -> bytes:
        """The header of an error that belongs to no connection."""
        ids, epochs = (self.next_id(), UNNUMBERED, 0), (self._actor_id, self._epoch, receiver.epoch)
        return encode_header(Header(PROTOCOL_VERSION, _NUMBERS[Verb.ERROR], *ids, *epochs, 0, SYSTEM_FLAG, 0, trace))
