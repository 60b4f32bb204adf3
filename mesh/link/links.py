"""Links to peers: dialing, the hello, one sticky path per peer, sequence numbers; what is no frame is refused.

    dial ──hello on both lanes──> peer ──welcome on both lanes──> up        no welcome in time, or down: peer lost
    A sender keeps one path per peer, its own dialed link or else the one the peer came on, while that lives; so
    messages of one lane stay in order. Losing the path loses the incarnation: both links are forgotten, everybody
    who waits for it is told, and the next message dials again.

Owned by `ActorSystem`; frames go on to it through `handlers`, one per verb.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from mesh.address import Address, Endpoint
from mesh.errors import SUPERSEDED, FrameRefused, Unreachable
from mesh.link.handshake import check_hello, check_welcome
from mesh.link.peer import PLAIN, SYSTEM, Meta, Peer, Wire
from mesh.link.redial import RedialPauses
from mesh.link.refusals import Refusals
from mesh.link.sequence import DUPLICATE, OTHER_CONNECTION, UNNUMBERED, connection_of
from mesh.membership.view import Member
from mesh.options import SystemOptions
from mesh.runtime.telemetry import Metrics, current_trace
from mesh.transport.base import Buffer, Lane, Link, Transport
from mesh.wire.frames import SYSTEM_CODEC, Bye, ErrorBody, Hello, Welcome
from mesh.wire.header import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    SYSTEM_FLAG,
    Header,
    Limits,
    Verb,
    check_sizes,
    encode_header,
    open_envelope,
)

_MAX_WAITING: Final = 1000
# msgspec encodes a member of an enumeration slowly.
_NUMBERS: Final = {verb: int(verb) for verb in Verb}

Handler = Callable[[Peer, Lane, Header, Sequence[Buffer]], None]


class Owner(Protocol):
    """What links need to know of the system above them."""

    def describe(self) -> Member:
        """This actor, for `hello` and `welcome`."""
        ...

    def locate(self, actor_id: str) -> tuple[Address, Endpoint] | None:
        """The living incarnation of an actor and where it listens."""
        ...

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """An incarnation is gone or cut off; its links are forgotten already."""
        ...

    def superseded(self, by: Address, reason: str) -> None:
        """A peer knows a later incarnation of this actor."""
        ...


class Links:
    """All links of one actor. Implements `mesh.transport.base.Listener`."""

    def __init__(
        self, address: Address, transport: Transport, owner: Owner, options: SystemOptions, metrics: Metrics
    ) -> None:
        self.address = address
        self.metrics = metrics
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(actor=address.actor_id, epoch=address.epoch)
        self.handlers: dict[int, Handler] = {}
        self.heard: Callable[[Address], None] = lambda _: None
        self._epoch = address.epoch
        self._transport = transport
        self._owner = owner
        self._options = options
        self._limits: Limits = options.limits
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, Peer] = {}
        self._wires: dict[Link, Wire] = {}
        self._pauses = RedialPauses(options.retry_min_s, options.retry_max_s)
        self._refusals = Refusals(metrics, self._log)
        self._connections = 0
        self._message_ids = 0

    def next_id(self) -> int:
        """A message id that this incarnation has not used."""
        self._message_ids += 1
        return self._message_ids

    def get(self, actor_id: str) -> Peer | None:
        """The peer with this actor id, if there is a link with it."""
        return self._peers.get(actor_id)

    def peers(self) -> list[Peer]:
        """All peers that there is a link with, itself not among them."""
        return [peer for peer in self._peers.values() if peer.address != self.address]

    def reach(self, actor_id: str) -> Peer:
        """The peer with this actor id, dialed if need be; raises `Unreachable`."""
        peer = self._peers.get(actor_id)
        if peer is not None:
            return peer
        if actor_id == self.address.actor_id:
            return self._reach_self()
        target = self._owner.locate(actor_id)
        if target is None:
            raise Unreachable(f"{actor_id} is not a member of the mesh")
        return self._dial(*target)

    def send(
        self, peer: Peer, lane: Lane, verb: Verb, body: bytes, buffers: Sequence[Buffer] = (), meta: Meta = PLAIN
    ) -> bool:
        """Send on the peer's path; False, counted, if that is gone or full."""
        wire = peer.path
        if wire is None:
            return False
        return self._send_on(wire, lane, verb, body, buffers, meta)

    def lose(self, address: Address, reason: str, keep: Link | None = None) -> None:
        """Forget an incarnation and tell whoever waits for it; nothing happens if it is not linked.

        The transport closes its links, but for `keep`, which begins anew.
        """
        peer = self._peers.get(address.actor_id)
        if peer is None or peer.address != address:
            return
        del self._peers[address.actor_id]
        self._refusals.link_ended(address)
        for wire in (peer.dialed, peer.accepted):
            if wire is not None:
                del self._wires[wire.link]
                if wire.hello_timer is not None:
                    wire.hello_timer.cancel()
                if address != self.address and wire.link != keep:
                    self._transport.close_link(wire.link)
        peer.path = peer.dialed = peer.accepted = None
        self.metrics.count("mesh_peers_lost_total")
        self._owner.peer_lost(peer, reason)

    def close(self) -> None:
        """Say goodbye to everybody and forget them, silently."""
        for peer in self.peers():
            for lane in Lane:
                self.send(peer, lane, Verb.BYE, SYSTEM_CODEC.encode(Bye()), (), SYSTEM)
        for wire in self._wires.values():
            if wire.hello_timer is not None:
                wire.hello_timer.cancel()
        self._peers.clear()
        self._wires.clear()

    # Listener

    def on_frames(self, link: Link, lane: Lane, parts: Sequence[Buffer]) -> None:
        """A message came: check it, count it, hand it to the handler of its verb."""
        header: Header | None = None
        try:
            header = open_envelope(parts)
            limits = self._limits
            if len(parts) > 2 or len(parts[0]) > limits.max_header_bytes or len(parts[1]) > limits.max_body_bytes:
                check_sizes(parts, limits)
            if header.receiver_epoch != self._epoch:
                raise FrameRefused("wrong_epoch", f"meant for epoch {header.receiver_epoch} of {self.address.actor_id}")
            address = link.peer
            if header.sender_epoch != address.epoch or header.sender != address.actor_id:
                raise FrameRefused("wrong_sender", f"says it is {header.sender}#{header.sender_epoch}")
            wire = self._wires.get(link)
            if wire is None:
                if header.verb == Verb.BYE:
                    return  # it is lost already, by the registry's word for example
                wire = self._admit(link, header, parts)
            missing = wire.incoming[lane].accept(header.sequence)
            if missing:
                if missing == DUPLICATE:
                    self._on_repeat(wire, header, parts)
                    return
                if missing == OTHER_CONNECTION:
                    wire = self._admit(link, header, parts)
                    wire.incoming[lane].accept(header.sequence)
                else:
                    self.metrics.count("mesh_frames_missing_total", missing)
            peer = wire.peer
            peer.num_heard[lane] += 1
            if peer.is_watched:
                self.heard(address)
            handler = self.handlers.get(header.verb)
            if handler is None:
                self._on_link_verb(wire, lane, header, parts)
                return
            if header.trace != current_trace.get():
                current_trace.set(header.trace)
            handler(peer, lane, header, parts)
        except FrameRefused as refusal:
            self._refuse(link, lane, header, refusal)

    def on_link_down(self, link: Link, reason: str) -> None:
        """A connection is gone, and with it the incarnation as far as this actor can tell."""
        wire = self._wires.get(link)
        if wire is None:
            return
        if link.dialed and not any(wire.greeted):
            self._pauses.failed(link.peer, self._loop.time())
        self.lose(link.peer, reason)

    # Incoming

    def _admit(self, link: Link, header: Header, parts: Sequence[Buffer]) -> Wire:
        """The record of a connection that begins; only a hello begins one.

        A peer dials only when it has no record of this actor, or has lost it. So a link with it from before, accepted
        from it or dialed and welcomed by it under a lower connection number, is one that the peer has forgotten.
        """
        if header.verb != Verb.HELLO or link.dialed:
            raise FrameRefused("no_hello", "a message without hello before it")
        check_hello(parts)
        connection = connection_of(header.sequence)
        known = self._peers.get(link.peer.actor_id)
        if known is not None and known.address == link.peer and known.is_older_than(connection):
            self.lose(link.peer, "it has begun again", keep=link)
        peer = self._greet(link.peer)
        wire = peer.accepted = self._add_wire(link, peer, connection)
        return wire

    def _on_repeat(self, wire: Wire, header: Header, parts: Sequence[Buffer]) -> None:
        if header.sequence != UNNUMBERED or header.verb != Verb.ERROR:
            self.metrics.count("mesh_frames_repeated_total")
            return
        body = SYSTEM_CODEC.decode(parts[1])
        error = body if isinstance(body, ErrorBody) else ErrorBody(code="refused", message="")
        if error.code == SUPERSEDED:
            self._owner.superseded(wire.link.peer, error.message)
        if not all(wire.greeted):
            self._pauses.failed(wire.link.peer, self._loop.time())
        self.lose(wire.link.peer, f"the peer refuses the link ({error.code}: {error.message})")

    def _on_link_verb(self, wire: Wire, lane: Lane, header: Header, parts: Sequence[Buffer]) -> None:
        """The verbs that are about the link itself."""
        match header.verb:
            case Verb.HELLO:
                self._on_hello(wire, lane, header, parts)
            case Verb.WELCOME:
                self._on_welcome(wire, lane, parts)
            case Verb.BYE:
                # Bulk may still be on its way when the control lane says bye; the peer is gone when both have said it.
                wire.said_bye[lane] = True
                if all(wire.said_bye):
                    self.lose(wire.link.peer, "it said bye")
            case _:
                raise FrameRefused("unknown_verb", f"verb {header.verb}")

    def _on_hello(self, wire: Wire, lane: Lane, header: Header, parts: Sequence[Buffer]) -> None:
        hello = check_hello(parts)
        peer, link = wire.peer, wire.link
        if link.dialed:
            raise FrameRefused("unexpected", "a hello from the dialed side")
        peer.member, peer.capabilities = hello.member, hello.capabilities
        wire.greeted[lane] = True
        welcome = Welcome(
            version=PROTOCOL_VERSION, member=self._owner.describe(), capabilities=self._options.capabilities
        )
        meta = Meta(correlation_id=header.message_id, flags=SYSTEM_FLAG)
        self._send_on(wire, lane, Verb.WELCOME, SYSTEM_CODEC.encode(welcome), (), meta)
        while wire.waiting[lane]:
            self._transport.send(link, lane, wire.waiting[lane].popleft())

    def _greet(self, address: Address) -> Peer:
        """The record of a peer that says hello; a new incarnation ends the old one, an old one is refused."""
        known = self._peers.get(address.actor_id)
        located = self._owner.locate(address.actor_id) if known is None else None
        newest = known.address.epoch if known is not None else located[0].epoch if located is not None else 0
        if newest > address.epoch:
            raise FrameRefused(SUPERSEDED, f"{address} says hello, epoch {newest} is known")
        if address.actor_id in ("", self.address.actor_id):
            raise FrameRefused("wrong_epoch", f"{address} says hello to {self.address}")
        if known is not None and known.address.epoch < address.epoch:
            self.lose(known.address, f"replaced by epoch {address.epoch}")
            known = None
        if known is None:
            if len(self._peers) >= self._options.max_peers:
                raise FrameRefused("too_many_peers", f"{self._options.max_peers} peers are linked already")
            known = self._peers[address.actor_id] = Peer(address)
        return known

    def _on_welcome(self, wire: Wire, lane: Lane, parts: Sequence[Buffer]) -> None:
        welcome = check_welcome(parts)
        if not wire.link.dialed:
            raise FrameRefused("unexpected", "a welcome from the dialing side")
        wire.peer.member, wire.peer.capabilities = welcome.member, welcome.capabilities
        wire.greeted[lane] = True
        if all(wire.greeted) and len({connection_of(numbers.last) for numbers in wire.incoming}) > 1:
            self.lose(wire.link.peer, "it has begun again")  # between the hellos of the two lanes
            return
        if all(wire.greeted) and wire.hello_timer is not None:
            wire.hello_timer.cancel()
            wire.hello_timer = None
            self._pauses.succeeded(wire.link.peer)

    def _refuse(self, link: Link, lane: Lane, header: Header | None, refusal: FrameRefused) -> None:
        self._refusals.note(link.peer, refusal)
        wire = self._wires.get(link)
        if refusal.code == "wrong_sender" and link.dialed and wire is not None:
            self._loop.call_soon(self.on_link_down, link, "another actor listens there")
            return
        located = self._owner.locate(link.peer.actor_id)
        is_member = located is not None and located[0] == link.peer
        answer = self._refusals.answer(header, refusal, is_linked=wire is not None, is_member=is_member)
        if wire is None:
            if answer is not None:
                error = self._header(link.peer, Verb.ERROR, UNNUMBERED, SYSTEM)
                self._transport.send(link, lane, (encode_header(error), answer.body))
            self._transport.close_link(link)
        elif answer is not None:
            meta = Meta(correlation_id=answer.correlation_id, flags=SYSTEM_FLAG)
            self._send_on(wire, lane, Verb.ERROR, answer.body, (), meta)

    # Outgoing

    def _dial(self, address: Address, endpoint: Endpoint) -> Peer:
        pause_s = self._pauses.remaining_s(address, self._loop.time())
        if pause_s:
            raise Unreachable(f"{address} could not be reached; it is tried again in {pause_s:.2f} s")
        if len(self._peers) >= self._options.max_peers:
            raise Unreachable(f"{self._options.max_peers} peers are linked already")
        link = self._transport.dial(address, endpoint)
        peer = self._peers[address.actor_id] = Peer(address)
        wire = peer.dialed = self._add_wire(link, peer)
        wire.hello_timer = self._loop.call_later(
            self._options.hello_timeout_s, self.on_link_down, link, "no welcome to hello"
        )
        hello = Hello(
            min_version=MIN_PROTOCOL_VERSION,
            max_version=PROTOCOL_VERSION,
            member=self._owner.describe(),
            capabilities=self._options.capabilities,
        )
        body = SYSTEM_CODEC.encode(hello)
        for lane in Lane:
            self._send_on(wire, lane, Verb.HELLO, body, (), SYSTEM)
        return peer

    def _reach_self(self) -> Peer:
        """Messages to itself take the way of all others, but through the loop instead of a transport."""
        peer = self._peers[self.address.actor_id] = Peer(self.address)
        wire = peer.dialed = self._add_wire(Link(self.address, dialed=True), peer)
        wire.greeted = [True, True]
        wire.is_self = True
        return peer

    def _add_wire(self, link: Link, peer: Peer, remote_connection: int = 0) -> Wire:
        self._connections += 1
        wire = self._wires[link] = Wire(link, peer, self._connections, remote_connection)
        if peer.path is None:
            peer.path = wire
        return wire

    def _send_on(self, wire: Wire, lane: Lane, verb: Verb, body: bytes, buffers: Sequence[Buffer], meta: Meta) -> bool:
        link, numbers = wire.link, wire.outgoing[lane]
        header = encode_header(self._header(link.peer, verb, numbers.take(), meta))
        parts: Sequence[Buffer] = (header, body, *buffers) if buffers else (header, body)
        if link.dialed:
            if not wire.is_self:
                if self._transport.send(link, lane, parts):
                    return True
            else:
                self._loop.call_soon(self.on_frames, link, lane, parts)
                return True
        elif wire.greeted[lane]:
            if self._transport.send(link, lane, parts):
                return True
        elif len(wire.waiting[lane]) < _MAX_WAITING:
            wire.waiting[lane].append(parts)
            return True
        numbers.give_back()
        self.metrics.count("mesh_outbox_full_total")
        return False

    def _header(self, receiver: Address, verb: Verb, sequence: int, meta: Meta) -> Header:
        message_id, correlation_id, timeout_us, flags, position = meta
        return Header(
            PROTOCOL_VERSION,
            _NUMBERS[verb],
            message_id or self.next_id(),
            sequence,
            correlation_id,
            self.address[0],
            self.address[1],
            receiver[1],
            timeout_us,
            flags,
            position,
            current_trace.get(),
        )
