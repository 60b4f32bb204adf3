"""Drives the links of one actor: feeds `LinkCore` frames, connection events and time, and carries out its outputs.

    transport --frames, down--> Links --> LinkCore --outputs--> Links --send, dial, close--> transport
                                  |  a message for the actor --> its verb's handler
                                  `- a peer is lost, superseded --> `when_lost`, `when_superseded`

Owned by `ActorSystem`. What is called may call back into this class. All outputs share one queue, which is
emptied before any later frame is sent, so that the frames of a channel leave in the order of their numbers.
"""

import asyncio
from collections.abc import Callable

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


class Links:
    """All links of one actor. Implements `mesh.transport.base.Listener`; `handlers` maps verbs to their handlers.

    Each `when_…` gets the fields of the output of its name (`mesh/link/outputs.py`), and is set before the start.
    """

    when_linked: Callable[[Address], object]
    when_lost: Callable[[Peer, str], object]
    when_found: Callable[[Address], object]
    when_superseded: Callable[[Address, str, int, bool], object]

    def __init__(
        self,
        address: Address,
        transport: Transport,
        directory: Directory,
        options: SystemOptions,
        metrics: Metrics,
        tasks: TaskSupervisor,
    ) -> None:
        self.address = address
        self.metrics = metrics
        self.handlers: dict[int, Handler] = {}
        self._log = options.log_of(address)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._core = core = LinkCore(address, options, metrics, directory)
        self._outputs, self._peers, self._write, self._receive = core.outputs, core.peers, core.write, core.receive
        self.next_id = core.next_id
        self._timer = DeadlineTimer(lambda: tasks, core.next_deadline, self._due, rest_s=0.0)

    def get(self, actor_id: str) -> Peer | None:
        return self._peers.get(actor_id)

    def peers(self) -> list[Peer]:
        """All linked peers, not counting this actor itself."""
        return [peer for peer in self._peers.values() if peer.address != self.address]

    def unreached(self) -> dict[Address, float]:
        """As `LinkCore.failing`, now."""
        return self._core.failing(self._time())

    def reach(self, actor_id: str) -> Peer:
        """The peer with this actor id, dialed if necessary; raises `Unreachable`."""
        peer = self._peers.get(actor_id)
        if peer is None:
            peer = self._core.dial(actor_id, self._time(), current_trace.get())
            self._carry_out()
        return peer

    def send(
        self, peer: Peer, channel: Channel, verb: Verb, body: bytes, buffers: Frames = (), meta: Meta = PLAIN
    ) -> bool:
        """Send on the peer's route. False if the route is full (this is counted) or the peer is lost."""
        # First, because frames that the core has queued on this connection (a hello, say) have lower numbers.
        if self._outputs:
            self._carry_out()
        route = peer.route
        if route is None:
            return False
        parts = self._write(route, channel, verb, body, buffers, meta, current_trace.get())
        if parts:
            if self._put(route.link, channel, parts):
                return True
            # The other end would count the number of a frame that was never sent as a missing frame.
            self._core.take_back(route, channel)
        elif parts is not None:
            return True
        self.metrics.count("mesh_outbox_full_total")
        return False

    def lose(self, address: Address, reason: str) -> None:
        self._core.lose(address, reason)
        self._carry_out()

    def suspect(self, actor_id: str) -> None:
        self._core.liveness.suspect(actor_id, self._time())
        self._carry_out()

    def beat(self) -> None:
        self._core.beat(self._time())
        self._carry_out()

    def close(self) -> None:
        self._core.close()
        self._carry_out()
        self._timer.cancel()

    # Listener

    def on_frames(self, link: Link, channel: Channel, parts: Frames) -> None:
        delivered = self._receive(link, channel, parts)
        if delivered is None:
            self._carry_out()
            return
        peer, header = delivered
        try:
            handler = self.handlers.get(header.verb)
            if handler is None:
                raise FrameRefused("unknown_verb", f"the verb {header.verb} is unknown")
            # Setting a context variable copies, and most frames of a burst have the same trace as the one before.
            if header.trace != current_trace.get():
                current_trace.set(header.trace)
            handler(peer, channel, header, parts)
        except FrameRefused as refusal:
            self._core.refuse(link, channel, header, refusal)
            self._carry_out()

    def on_refused(self, link: Link, refusal: FrameRefused) -> None:
        self._core.refuse(link, Channel.CONTROL, None, refusal)
        self._carry_out()

    def on_link_down(self, link: Link, reason: str) -> None:
        self._core.down(link, reason, self._time())
        self._carry_out()

    def on_some_link_down(self) -> None:
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
                case Linked():
                    self.when_linked(*output)
                case Lost():
                    self.when_lost(*output)
                case Found():
                    self.when_found(*output)
                case Superseded():
                    self.when_superseded(*output)
                case Refused(peer, refusal):
                    # NO_HANDSHAKE is what a container's health check looks like: nothing anybody could fix.
                    say = self._log.info if refusal.code == NO_HANDSHAKE else self._log.warning
                    say("frame refused", peer=str(peer), code=refusal.code, why=refusal.message)
        self._timer.arm()

    def _put(self, link: Link, channel: Channel, parts: Frames) -> bool:
        """Send one frame. Messages to this actor itself go through the event loop instead of the transport."""
        if link.peer is self.address:
            # Not at once: the handler would run inside the one that sends, and see its work half done.
            self._loop.call_soon(self.on_frames, link, channel, parts)
            return True
        return self._transport.send(link, channel, parts)
