"""The state machine of one actor's links. Pure.

Frames, connection events and time go in; frames to send, messages to deliver, events and the next deadline come out.
A connection is either dialed by this actor or accepted from a peer. A peer has at most one of each; all messages to it
take the same one, its route, until the peer is lost. A connection has two channels (control, data), each in a phase:

    phase      on a dialed connection                 on an accepted connection
    HELD       -                                      no hello yet: up to 1,000 outgoing messages wait
    GREETING   hello sent: messages follow at once    -
    OPEN       welcome received                       hello received: welcome sent, then the messages that waited
    CLOSED     bye received: nothing more comes       bye received: nothing more comes

    event                      no link with that incarnation        linked
    message to send            dial, hello on both channels         sent on the route
    hello                      accept. Older epoch linked: that     opens its channel; from a later connection than the
                               one is lost. Newer epoch known:      known one: lost, then accepted anew
                               refused, `superseded`. Proof wrong
                               or missing: refused
    welcome on both channels   refused                              dial complete; from two different connections: lost
    bye on both channels       ignored                              lost
    error, sequence 0          refused                              lost
    any other frame            refused, `no_hello`                  delivered; dropped if its sequence number is not
                                                                    above the last one on its channel
    peer suspected             ignored                              ping on both channels; either stays silent: lost
    later epoch answers dial   -                                    the later epoch is found, the dialed one lost
    connection down            ignored                              lost
    no welcome in time         -                                    lost
    watched peer falls silent  -                                    lost

A lost peer is forgotten entirely, with both connections. The next message to it dials again, after a pause if the last
dial got no welcome. Invariants, whatever the order of events (`tests/mesh/link/test_core.py`):
1. A peer has at most two connections, each recorded under it alone. Its route is one of them, fixed until it is lost.
2. Sequence numbers sent on one channel of a connection increase by exactly one.
3. Messages delivered from one channel of a connection come from one incarnation, in the order sent, each once.
4. A peer is lost at most once, and nothing from it is delivered afterwards.
5. Every dialed connection that is not up has a deadline, and so does every unanswered ping.
6. `Found` names a later incarnation of the peer that was dialed, and the dialed one is lost.

Driven by `mesh/link/links.py`.
"""

from collections import deque
from typing import Final

from mesh.address import Address
from mesh.errors import (
    PROOF_CODES,
    REFUSAL_CODES,
    SUPERSEDED,
    TOO_MANY_PEERS,
    WRONG_EPOCH,
    FrameRefused,
    Unreachable,
)
from mesh.link.handshake import WELCOME, Handshake
from mesh.link.liveness import Liveness
from mesh.link.outputs import Close, Dial, Found, Frames, Lost, Output, Refused, Send, Superseded
from mesh.link.peer import SYSTEM, UNNUMBERED, Connection, Message, Meta, Peer, Phase, answer_to, connection_of
from mesh.link.refusals import REPORTED_CODES, LogOnce, error_body, is_answered, later_incarnation
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

_MOST: Final = "the maximum (4,096, or as many as `ulimit -n` has room for)"
_LINK_VERBS: Final = frozenset((Verb.HELLO, Verb.WELCOME, Verb.BYE))
_OTHERS: Final = frozenset(("wrong_sender", *PROOF_CODES))
_ANSWERS: Final = frozenset((Verb.REPLY, Verb.ERROR))
_MAX_WAITING: Final = 1000
"""More than a turn sends in the 2 s until a hello is due; what a peer that never says it can hold here is bounded."""
_HELD: Final = Phase.HELD
# msgspec is slow at encoding enum members.
_NUMBERS: Final = {verb: int(verb) for verb in Verb}


class LinkCore:
    """The links of one incarnation. After each call the caller carries out `outputs`, oldest first."""

    def __init__(self, address: Address, options: SystemOptions, metrics: Metrics, directory: Directory) -> None:
        self.outputs: deque[Output] = deque()
        self.peers: dict[str, Peer] = {}
        self.address = address
        self._actor_id, self._epoch = address
        self._options = options
        self._max_header_bytes = options.limits.max_header_bytes
        self._max_body_bytes = options.limits.max_body_bytes
        self._metrics = metrics
        metrics.begin("mesh_frames_refused_total", code=REFUSAL_CODES)
        metrics.begin(
            "mesh_peers_lost_total", "mesh_outbox_full_total", "mesh_frames_repeated_total", "mesh_frames_missing_total"
        )
        self._locate = directory.locate
        self._connections: dict[Link, Connection] = {}
        self._deadlines = Deadlines()
        self._log_once = LogOnce()
        self._now = 0.0
        self._num_connections = self._message_ids = 0
        self.next_deadline = self._deadlines.next
        self.liveness = Liveness(self, self.peers, options, metrics, self._deadlines)
        self._handshake = Handshake(self, options, directory, self._deadlines)

    # From the actor

    def dial(self, actor_id: str, now: float, trace: str) -> Peer:
        """Start a link with an actor that is not in `peers`; raises `Unreachable`."""
        if actor_id == self._actor_id:
            return self._connect(Link(self.address, dialed=True)).peer
        located = self._locate(actor_id)
        if located is None:
            raise Unreachable(f"{actor_id} is not a member of the mesh")
        address, endpoint = located
        self._handshake.check_pause(address, now)
        if len(self.peers) >= self._options.max_peers:
            raise Unreachable(f"already linked to {self._options.max_peers} peers, {_MOST}")
        self._now = now
        self.outputs.append(Dial(address, endpoint))
        connection = self._connect(Link(address, dialed=True))
        self._handshake.begin(connection, now, trace)
        return connection.peer

    def lose(self, address: Address, reason: str, keep: Link | None = None) -> None:
        """Forget an incarnation and emit `Lost`; a no-op if it is not linked. The link `keep` is not closed."""
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

    def failing(self, now: float) -> dict[Address, float]:
        """Incarnations that gave no answer when they were dialed last, with the seconds since the first such dial."""
        found = self._handshake.failing(now)
        for peer in self.peers.values():
            # It may have dialed this actor since.
            if peer.address in found and any(connection.is_up for connection in peer.connections):
                del found[peer.address]
        return found

    def close(self) -> None:
        """Say bye to every peer and forget it, without emitting `Lost`."""
        body = SYSTEM_CODEC.encode(Bye())
        for peer in list(self.peers.values()):
            # An actor's link with itself has no other end to say bye to.
            if peer.route is not None and peer.address != self.address:
                for channel in Channel:
                    self.say(peer.route, channel, Verb.BYE, body, (), SYSTEM, "")
            self._forget(peer)

    def next_id(self) -> int:
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

    # From the network

    def receive(self, link: Link, channel: Channel, parts: Frames) -> tuple[Peer, Header] | None:
        """Handle a frame. Returns its sender and header if it is to be delivered, and then adds no `outputs`."""
        header: Header | None = None
        try:
            header = open_envelope(parts)
            # Checked inline first: most frames have two small parts and need no call.
            if len(parts) > 2 or len(parts[0]) > self._max_header_bytes or len(parts[1]) > self._max_body_bytes:
                check_sizes(parts, self._options.limits)
            if header.receiver_epoch != self._epoch:
                self._note_successor(link, header, parts)
                raise FrameRefused(WRONG_EPOCH, f"the epoch here is {self._epoch}", known_epoch=self._epoch)
            if link.peer != (header.sender, header.sender_epoch):
                self._from_another(link, header, parts)
                return None
            connection = self._connections.get(link)
            if connection is None:
                if header.verb == Verb.BYE:
                    # The peer is lost already (the registry may have said so), but the transport has recorded it anew.
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
        """Refuse a frame that is malformed or not meant for this actor; `header` is None if it could not be read."""
        self._metrics.count("mesh_frames_refused_total", code=refusal.code)
        if self._log_once.is_new(link.peer, refusal, self._now):
            self.outputs.append(Refused(link.peer, refusal))
        connection = self._connections.get(link)
        if refusal.code in _OTHERS and link.dialed and connection is not None:
            self._fail(connection, "another actor listens at its address")
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
        """An outbox is full. A peer that takes nothing is slow, not silent; the transport reports it if it is gone."""
        self._metrics.count("mesh_outbox_full_total")
        connection = self._connections.get(output.link)
        if connection is not None:
            self.liveness.end_ping(connection.peer, output.channel)

    def down(self, link: Link, reason: str, now: float) -> None:
        connection = self._connections.get(link)
        self._now = now
        if connection is not None:
            self._fail(connection, reason)

    # By the clock

    def beat(self, now: float) -> None:
        # Events that carry no time (a refusal, say) then start their pause before the next dial from about now, not
        # from when the peer was dialed.
        self._now = now
        for peer in self.liveness.beat(now):
            self.lose(peer.address, "its heartbeats stopped")

    def due(self, now: float) -> None:
        self._now = now
        while (key := self._deadlines.pop_due(now)) is not None:
            kind, actor_id = key
            peer = self.peers[actor_id]
            if kind == WELCOME:
                self.down(Link(peer.address, dialed=True), "no welcome in answer to hello", now)
            elif self.liveness.due(peer, Channel[kind]):
                self.lose(peer.address, "it does not answer")

    # Internals

    def _accept(self, link: Link, header: Header, parts: Frames) -> Connection:
        """Accept a connection that a peer has dialed; its first frame must be a hello.

        A peer dials only if it has no record of this actor or has lost it. So an existing link, accepted from the peer
        or dialed and welcomed by it under a lower connection number, is one that the peer has forgotten.
        """
        if header.verb != Verb.HELLO or link.dialed:
            raise FrameRefused("no_hello", "a message came with no hello before it")
        # Checked before any peer is lost: an impostor must not end the link of the actor whose name it claims.
        self._handshake.vet_hello(link.peer, parts)
        address, number = link.peer, connection_of(header.sequence)
        peer = self.peers.get(address.actor_id)
        located = self._locate(address.actor_id) if peer is None else None
        newest = peer.address.epoch if peer is not None else located[0].epoch if located is not None else 0
        if newest > address.epoch:
            endpoint = located[1] if located is not None else peer.member.endpoint if peer and peer.member else None
            where = f", at {endpoint.control}" if endpoint is not None else ""
            raise FrameRefused(
                SUPERSEDED, f"hello from {address}, but epoch {newest} of it is known{where}", known_epoch=newest
            )
        if address.actor_id in ("", self._actor_id):
            raise FrameRefused(WRONG_EPOCH, f"hello to {self.address} from {address}, which is not another actor")
        connections = peer.connections if peer is not None else []
        if peer is not None and newest < address.epoch:
            self.lose(peer.address, f"replaced by epoch {address.epoch}")
        elif link in self._connections or any(0 < connection.remote < number for connection in connections):
            self.lose(address, "it restarted the connection", keep=link)
        elif any(not connection.link.dialed for connection in connections):
            # A late hello, overtaken by that of a newer connection: its peer has given this connection up.
            raise FrameRefused("no_hello", "this incarnation has made a later connection")
        if address.actor_id not in self.peers and len(self.peers) >= self._options.max_peers:
            raise FrameRefused(TOO_MANY_PEERS, f"already linked to {self._options.max_peers} peers, {_MOST}")
        return self._connect(link, number)

    def _from_another(self, link: Link, header: Header, parts: Frames) -> None:
        """A frame whose sender is not the link's peer: refused, unless it announces a successor of that peer."""
        successor = later_incarnation(link.peer, header, parts) if link.dialed else None
        if successor is None:
            raise FrameRefused("wrong_sender", f"claims to be {header.sender}#{header.sender_epoch}")
        connection = self._connections.get(link)
        if connection is not None:
            self.outputs.append(Found(successor))
            self._fail(connection, f"epoch {successor.epoch} listens at its address")

    def _note_successor(self, link: Link, header: Header, parts: Frames) -> None:
        """A frame is meant for another incarnation of this actor: a peer that dials a later one knows of that one."""
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
        """The connection of a frame that is not the next one on its channel; None if the frame goes no further."""
        sequence, last = header.sequence, connection.channels[channel].received
        remote, number = connection.remote, connection_of(sequence)
        if sequence == UNNUMBERED and header.verb == Verb.ERROR:
            body = SYSTEM_CODEC.decode(parts[1])
            error = body if isinstance(body, ErrorBody) else ErrorBody(code="refused", message="")
            if error.code == SUPERSEDED:
                self.outputs.append(Superseded(connection.link.peer, error.message, error.known_epoch))
            told = FrameRefused(error.code, f"the peer answered: {error.message}")
            if error.code in REPORTED_CODES and self._log_once.is_new(connection.link.peer, told, self._now):
                self.outputs.append(Refused(connection.link.peer, told))
            connection.peer.refusal = error.code
            self._fail(connection, f"the peer refuses the link ({error.code}: {error.message})")
            return None
        # A duplicate made by the network, or a late frame of a connection that has been replaced.
        if sequence <= last or number < remote:
            self._metrics.count("mesh_frames_repeated_total")
            return None
        if number == remote:
            if last:
                self._metrics.count("mesh_frames_missing_total", sequence - last - 1)
        elif not connection.link.dialed:
            connection = self._accept(connection.link, header, parts)
        elif remote:
            # The peer has answered an earlier hello, or has forgotten this connection and taken it for a new one.
            self.lose(connection.link.peer, "it restarted the connection")
            return None
        connection.remote = number
        connection.channels[channel].received = sequence
        return connection

    def _on_link_verb(self, connection: Connection, channel: Channel, header: Header, parts: Frames) -> None:
        if header.verb != Verb.BYE:
            self._handshake.greeted(connection, channel, header, parts)
            return
        # Bulk may still be in flight when the control channel says bye: the peer is gone once both channels have.
        connection.channels[channel].phase = Phase.CLOSED
        if all(state.phase is Phase.CLOSED for state in connection.channels):
            self.lose(connection.link.peer, "it said bye")
        self._handshake.end_if_up(connection)

    def _fail(self, connection: Connection, reason: str) -> None:
        """A connection has ended or never came up; in the latter case `_now` is no older than its dial."""
        self._handshake.failed(connection, self._now)
        self.lose(connection.link.peer, reason)

    def say(self, connection: Connection, channel: Channel, *message: *Message) -> None:
        parts = self.write(connection, channel, *message)
        if parts:
            self.outputs.append(Send(connection.link, channel, parts))

    def _unnumbered_error(self, receiver: Address, trace: str) -> bytes:
        ids, epochs = (self.next_id(), UNNUMBERED, 0), (self._actor_id, self._epoch, receiver.epoch)
        return encode_header(Header(PROTOCOL_VERSION, _NUMBERS[Verb.ERROR], *ids, *epochs, 0, SYSTEM_FLAG, 0, trace))
