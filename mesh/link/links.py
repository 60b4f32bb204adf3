"""The links of one actor, driven: gives `LinkCore` frames, connection events and time, and carries out what it wants.

    transport --frames, down--> Links --> LinkCore --outputs--> Links --send, dial, close--> transport
                                  |  a message for the actor --> its verb's handler
                                  `- a peer is lost, superseded --> owner

Owned by `ActorSystem`. What the owner or a handler does meanwhile comes back here; outputs are in one queue, and the
first frame that is sent after them takes them along, so that a channel's frames go in the order of their numbers.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from mesh.address import Address
from mesh.errors import NO_HANDSHAKE, FrameRefused
from mesh.link.core import LinkCore
from mesh.link.outputs import Close, Dial, Found, Frames, Linked, Lost, Refused, Send, Superseded
from mesh.link.peer import PLAIN, Meta, Peer
from mesh.membership.view import Directory
from mesh.options import SystemOptions
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.telemetry import Metrics, current_trace
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Channel, Link, Transport
from mesh.wire.header import Header, Verb

Handler = Callable[[Peer, Channel, Header, Frames], None]


class Owner(Directory, Protocol):
    """What links need to know of the system above them."""

    def linked(self, peer: Address) -> None:
        """A connection with an incarnation is up, whichever end has dialed."""
        ...

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """An incarnation is gone or cut off; its links are forgotten already."""
        ...

    def found(self, address: Address) -> None:
        """A later incarnation of a peer listens where that was dialed; the link with that is lost in a moment."""
        ...

    def superseded(self, by: Address, reason: str, known_epoch: int, *, is_proved: bool) -> None:
        """A peer knows a later incarnation of this actor, `known_epoch`; see `mesh.link.outputs.Superseded`."""
        ...


class Links:
    """All links of one actor. Implements `mesh.transport.base.Listener`; `handlers` are called by verb."""

    def __init__(
        self,
        address: Address,
        transport: Transport,
        owner: Owner,
        options: SystemOptions,
        metrics: Metrics,
        tasks: TaskSupervisor,
    ) -> None:
        self.address = address
        self.metrics = metrics
        self.handlers: dict[int, Handler] = {}
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(actor=address.actor_id, epoch=address.epoch)
        self._transport = transport
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._core = core = LinkCore(address, options, metrics, owner)
        self._outputs, self._peers, self._write, self._receive = core.outputs, core.peers, core.write, core.receive
        self.next_id = core.next_id
        self._timer = DeadlineTimer(lambda: tasks, core.next_deadline, self._due, rest_s=0.0)

    def get(self, actor_id: str) -> Peer | None:
        """The peer with this actor id, if there is a link with it."""
        return self._peers.get(actor_id)

    def peers(self) -> list[Peer]:
        """All peers that there is a link with, itself not among them."""
        return [peer for peer in self._peers.values() if peer.address != self.address]

    def reach(self, actor_id: str) -> Peer:
        """The peer with this actor id, dialed if need be; raises `Unreachable`."""
        peer = self._peers.get(actor_id)
        if peer is None:
            peer = self._core.dial(actor_id, self._time(), current_trace.get())
            self._carry_out()
        return peer

    def send(
        self, peer: Peer, channel: Channel, verb: Verb, body: bytes, buffers: Frames = (), meta: Meta = PLAIN
    ) -> bool:
        """Send on the peer's route; False, counted, if that is full, and False if the peer is lost."""
        # Before this frame: what the core wants sent on this connection, a hello for one, has the lower number.
        if self._outputs:
            self._carry_out()
        route = peer.route
        if route is None:
            return False
        parts = self._write(route, channel, verb, body, buffers, meta, current_trace.get())
        if parts:
            if self._put(route.link, channel, parts):
                return True
            # A number given to a frame that did not go would be counted as a frame missing at the other end.
            self._core.take_back(route, channel)
        elif parts is not None:
            return True
        self.metrics.count("mesh_outbox_full_total")
        return False

    def lose(self, address: Address, reason: str) -> None:
        """Forget an incarnation and tell whoever waits for it; nothing happens if it is not linked."""
        self._core.lose(address, reason)
        self._carry_out()

    def suspect(self, actor_id: str) -> None:
        """Somebody waits for a peer in vain: it is lost if it leaves a ping unanswered and says nothing else either."""
        self._core.liveness.suspect(actor_id, self._time())
        self._carry_out()

    def beat(self) -> None:
        """Called every heartbeat: who is watched and silent is lost."""
        self._core.beat(self._time())
        self._carry_out()

    def close(self) -> None:
        """Say goodbye to everybody and forget them, silently."""
        self._core.close()
        self._carry_out()
        self._timer.cancel()

    # Listener

    def on_frames(self, link: Link, channel: Channel, parts: Frames) -> None:
        """A message came: to the handler of its verb with it, if it is for the actor."""
        delivered = self._receive(link, channel, parts)
        if delivered is None:
            self._carry_out()
            return
        peer, header = delivered
        try:
            handler = self.handlers.get(header.verb)
            if handler is None:
                raise FrameRefused("unknown_verb", f"verb {header.verb}")
            # Setting a context variable copies; most frames of a burst have the trace of the one before.
            if header.trace != current_trace.get():
                current_trace.set(header.trace)
            handler(peer, channel, header, parts)
        except FrameRefused as refusal:
            self._core.refuse(link, channel, header, refusal)
            self._carry_out()

    def on_refused(self, link: Link, refusal: FrameRefused) -> None:
        """A connection or a message is refused by the transport: counted, and logged once."""
        self._core.refuse(link, Channel.CONTROL, None, refusal)
        self._carry_out()

    def on_link_down(self, link: Link, reason: str) -> None:
        """A connection is gone, and with it the incarnation as far as this actor can tell."""
        self._core.down(link, reason, self._time())
        self._carry_out()

    def on_some_link_down(self) -> None:
        """A connection from another host is gone: who has made one is asked whether it is still there."""
        self._core.liveness.suspect_far(self._time())
        self._carry_out()

    def _due(self, now: float) -> None:
        self._core.due(now)
        self._carry_out()

    def _carry_out(self) -> None:
        outputs = self._outputs
        while outputs:
            match output := outputs.popleft():
                case Send():
                    if not self._put(*output):
                        self._core.not_taken(output)
                case Dial():
                    self._transport.dial(*output)
                case Close():
                    self._transport.close_link(output.link)
                case Linked(peer):
                    self._owner.linked(peer)
                case Lost():
                    self._owner.peer_lost(*output)
                case Found(address):
                    self._owner.found(address)
                case Superseded(by, reason, known_epoch, is_proved):
                    self._owner.superseded(by, reason, known_epoch, is_proved=is_proved)
                case Refused(peer, refusal):
                    # The health check of a container does so, and nobody could mend it.
                    say = self._log.info if refusal.code == NO_HANDSHAKE else self._log.warning
                    say("frame refused", peer=str(peer), code=refusal.code, why=refusal.message)
        self._timer.arm()

    def _put(self, link: Link, channel: Channel, parts: Frames) -> bool:
        """Messages to itself take the way of all others, but through the loop instead of a transport."""
        if link.peer is self.address:
            # Through the loop, not at once: a handler would run inside the one that sends, and find half of what it
            # does.
            self._loop.call_soon(self.on_frames, link, channel, parts)
            return True
        return self._transport.send(link, channel, parts)
