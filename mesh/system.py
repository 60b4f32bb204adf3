"""One actor's half of the mesh: wires links, calls, heartbeats, membership and topics to the actor, and answers
what is asked of every actor (statistics, description, drain, shutdown).

Uses the loop's clock, tasks and futures and a `Transport`, nothing else: no ZeroMQ, no threads, no wall clock, so it
runs unchanged on virtual time. Made by `mesh/run.py` for a process, by tests and simulations directly.

    new --start()--> starting --ready_after_start, or the actor's word--> ready --drain()--> draining --stop()--> gone
"""

import asyncio
import os
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
import structlog

from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.calls.asking import Asking
from mesh.calls.serving import IncomingCall, Serving
from mesh.context import ActorContext
from mesh.errors import NOT_SERVED, FrameRefused
from mesh.link.links import Links
from mesh.link.peer import SYSTEM, Peer
from mesh.membership.heartbeats import Heartbeats
from mesh.membership.probing import Probing
from mesh.membership.registration import Registration
from mesh.membership.view import DRAINING, READY, STARTING, SUPERVISOR, Bootstrap, Member, MemberChange
from mesh.options import SystemOptions
from mesh.pubsub.publishing import Publishing
from mesh.runtime.boundary import Boundary
from mesh.runtime.own_figures import OwnFigures
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Buffer, Lane, Transport
from mesh.wire.frames import (
    SYSTEM_CODEC,
    Describe,
    DescribeRequest,
    Drain,
    Drained,
    Draining,
    Heartbeat,
    MembersChanged,
    PeerDown,
    Ping,
    Pong,
    Renew,
    Shutdown,
    ShuttingDown,
    StatsReply,
    StatsRequest,
    Unsubscribe,
)
from mesh.wire.header import SYSTEM_FLAG, Header, Verb
from mesh.wire.wording import Wording

_LEAVE_S: Final = 0.25
_BYE_GRACE_S: Final = 1.0
_MAX_PROGRESS_CHARS: Final = 200


class ActorSystem:
    """The system of one incarnation of one actor. All methods are called on the event loop's thread."""

    def __init__(
        self,
        actor: Actor,
        address: Address,
        transport: Transport,
        bootstrap: Bootstrap,
        options: SystemOptions | None = None,
    ) -> None:
        self.actor = actor
        self.address = address
        self.options = options or SystemOptions()
        self.metrics = Metrics()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(actor=address.actor_id, epoch=address.epoch)
        self._bootstrap = bootstrap
        self._member = Member(
            actor_id=address.actor_id,
            role=actor.role,
            epoch=address.epoch,
            endpoint=Endpoint("", ""),
            host=self.options.host,
            pid=self.options.pid or os.getpid(),
            attributes=self.options.attributes,
        )
        self._shutdown: asyncio.Future[str] = self._loop.create_future()
        self._drained: asyncio.Task[None] | None = None
        self._stopped = False

        self.boundary = Boundary(self._log, self.metrics)
        self._figures = OwnFigures(actor, self.metrics, self.boundary, self.options.usage)
        self.wording = Wording(actor.codec, self.options.limits)
        self._decode = actor.codec.decode
        self.links = Links(address, transport, self, self.options, self.metrics)
        self.asking = Asking(self.links, self.wording, self.options.max_pending_calls)
        self.serving = Serving(self.links, self.wording, self.options.mailbox_capacity, self._on_call, self._guard)
        self.publishing = Publishing(self.links, actor.codec, self, self.options)
        self.registration = Registration(self.asking, bootstrap, self.options, self.describe, self, self.boundary)
        self._probing = Probing(self.links, self.asking, self.boundary, self.options.hello_timeout_s)
        self.asking.doubt = self._probing.doubt
        self.heartbeats = Heartbeats(self.links, self.options, self, self._hubs)
        self.links.handlers[Verb.TELL] = self._on_tell
        self.links.handlers[Verb.DRAIN] = self._on_draining
        actor.ctx = ActorContext(self, self._log)

    async def start(self) -> None:
        """Bind, begin to join, start the actor. Raises what the actor's `start` raises, and is then stopped."""
        endpoint = await self._transport.start(self.address, self.links)
        self._member = msgspec.structs.replace(self._member, endpoint=endpoint)
        try:
            self.heartbeats.start()
            if self.actor.joins:
                self.registration.start()
            await self.actor.start()
        except BaseException:
            await self.stop()
            raise
        if self.actor.ready_after_start and self._member.state == STARTING:
            self.announce(READY, {})

    async def joined(self) -> None:
        """Wait until the registry has taken this actor in."""
        await self.registration.joined()

    async def drain(self) -> None:
        """Take no new work and wait until the actor is empty. Idempotent."""
        if self._drained is None:
            self.announce(DRAINING, {})
            body = SYSTEM_CODEC.encode(Draining())
            for peer in self.links.peers():
                self.links.send(peer, Lane.CONTROL, Verb.DRAIN, body, (), SYSTEM)
            self._drained = self._loop.create_task(self.actor.drain(), name="drain")
        await asyncio.shield(self._drained)

    async def stop(self) -> None:
        """Leave, say bye, give everything back. Idempotent; does not wait for work, see `drain`."""
        if self._stopped:
            return
        self._stopped = True
        if self._drained is not None:
            self._drained.cancel()
        self.heartbeats.close()
        self.publishing.close()
        self._probing.close()
        try:
            await self.actor.stop()
        except Exception as error:  # noqa: BLE001
            self.boundary.failed("stop", error)
        await self.boundary.close()
        self.serving.close()
        if self.actor.joins:
            await self.registration.leave(_LEAVE_S)
        self.asking.close()
        self.links.close()
        await self._transport.stop()
        self.end("stopped")

    def end(self, reason: str) -> bool:
        """Have whoever runs this actor end it. False: that was asked before."""
        if self._shutdown.done():
            return False
        self._shutdown.set_result(reason)
        return True

    async def shutdown_asked(self) -> str:
        """Wait until a peer or the actor itself asks that it end (or it has); the reason given."""
        return await asyncio.shield(self._shutdown)

    # For the parts of the system

    def describe(self) -> Member:
        """This actor as a member."""
        return self._member

    def announce(self, state: str | None, attributes: dict[str, Any]) -> None:
        """See `Context.announce`. A draining actor does not become ready again."""
        member = self._member
        if state is None or member.state == DRAINING:
            state = member.state
        self._member = msgspec.structs.replace(member, state=state, attributes={**member.attributes, **attributes})
        self.registration.announce()
        if state != member.state:
            self.heartbeats.send_now()

    def locate(self, actor_id: str) -> tuple[Address, Endpoint] | None:
        """Where an actor is: the registry by the bootstrap, the supervisor by the options, the others by the view."""
        supervisor = self.options.supervisor
        if supervisor is not None and supervisor[0].actor_id == actor_id:
            return supervisor
        registry = self._bootstrap.lookup()
        if registry is not None and registry[0].actor_id == actor_id:
            return registry
        member = self.registration.view.get(actor_id)
        return None if member is None else (member.address, member.endpoint)

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """An incarnation is gone or cut off: everybody who waits for it is told, then the actor."""
        self._log.debug("peer lost", peer=str(peer.address), reason=reason)
        self.heartbeats.forget(peer.address)
        self.asking.lose(peer, reason)
        self.serving.lose(peer, reason)
        self.publishing.lose(peer)
        self.registration.peer_lost(peer.address)
        self.boundary.call("on_peer_lost", self.actor.on_peer_lost, peer.address, reason)

    def superseded(self, by: Address, reason: str) -> None:
        """A peer knows a later incarnation of this actor: the registry is believed, and then this one is over."""
        registry = self._bootstrap.lookup()
        if registry is not None and registry[0] == by and self.end("superseded"):
            self._log.warning("superseded", by=str(by), why=reason)

    def members_changed(self, change: MemberChange, leaving: Collection[Address] = ()) -> None:
        """The view has changed: links with who has left end, topics of who has come are asked for.

        The registry's word may overtake the last messages of who leaves in good order, so its bye is waited for.
        """
        for member in change.left:
            if member.address in leaving:
                self._loop.call_later(_BYE_GRACE_S, self.links.lose, member.address, "it left the mesh")
            else:
                self.links.lose(member.address, "it left the mesh")
        self.boundary.call("on_members", self.actor.on_members, change.joined, change.left, change.changed)
        for member in change.joined:
            self.publishing.appeared(member.actor_id)

    def publication(self, publisher: Address, topic: str, sequence: int, message: object) -> None:
        """A publication goes to the actor."""
        self.boundary.call("on_publication", self.actor.on_publication, publisher, topic, sequence, message)

    def subscription_reset(self, publisher: Address, topic: str) -> None:
        """A reset goes to the actor."""
        self.boundary.call("on_subscription_reset", self.actor.on_subscription_reset, publisher, topic)

    def subscriber_reset(self, subscriber: Address, topic: str) -> None:
        """That a subscriber starts from nothing goes to the actor."""
        self.boundary.call("on_subscriber_reset", self.actor.on_subscriber_reset, subscriber, topic)

    def doubt(self, address: Address) -> None:
        """Somebody waits for a peer in vain."""
        self._probing.doubt(address)

    def state(self) -> str:
        """What heartbeats say of this actor."""
        return self._member.state

    def progress(self) -> str:
        """What heartbeats say of what takes this actor long."""
        try:
            return self.actor.progress()[:_MAX_PROGRESS_CHARS]
        except Exception as error:  # noqa: BLE001
            self.boundary.failed("progress", error)
            return ""

    def answer_to(self, peer: Address) -> Heartbeat:
        """What this actor, as a hub, answers to a heartbeat."""
        return self.actor.heartbeat_to(peer)

    def heartbeat(self, peer: Address, beat: Heartbeat | Renew) -> None:
        """A heartbeat came, to this actor as a hub or from one of its hubs."""
        if isinstance(beat, Renew):
            self.boundary.call("on_heartbeat", self.actor.on_heartbeat, peer, beat.state, beat.progress)
        else:
            self.registration.heartbeat(peer, beat)

    def _hubs(self) -> list[str]:
        hubs = [self.options.supervisor[0].actor_id] if self.options.supervisor is not None else []
        registry = self.registration.registry
        return [*hubs, registry.actor_id] if registry is not None else hubs

    def _guard(self, callback: Any) -> None:
        self.boundary.call("on_cancel", callback)

    # Dispatch

    def _on_tell(self, peer: Peer, lane: Lane, header: Header, parts: Sequence[Buffer]) -> None:
        if header.flags & SYSTEM_FLAG:
            self._on_system_tell(peer.address, SYSTEM_CODEC.decode(parts[1]))
            return
        message = self._decode(parts[1])
        try:
            self.actor.on_tell(peer.address, message, parts[2:])
        except Exception as error:  # noqa: BLE001
            self.boundary.failed(f"on_tell({type(message).__name__})", error, message)

    def _on_system_tell(self, sender: Address, message: Any) -> None:
        match message:
            case MembersChanged() if self.registration.members_changed(sender, message):
                return
            case PeerDown() if sender == self.registration.registry or self._is_supervisor(sender):
                dead = Address(message.actor_id, message.epoch)
                self.links.lose(dead, message.reason or "its supervisor says it is dead")
                change = self.registration.view.forget(dead)
                if change:
                    self.members_changed(change)
            case Unsubscribe():
                self.publishing.unsubscribed(sender, message.topic)
            case _:
                raise FrameRefused("unexpected", f"{type(message).__name__} is not for {sender} to tell")

    def _on_draining(self, peer: Peer, lane: Lane, header: Header, parts: Sequence[Buffer]) -> None:
        change = self.registration.view.mark_draining(peer.address)
        if change:
            self.members_changed(change)

    def _on_call(self, call: IncomingCall, header: Header) -> None:
        if header.flags & SYSTEM_FLAG and not isinstance(call.message, self.actor.system_asks):
            self._answer_system(call)
            return
        try:
            self.actor.on_ask(call)
        except Exception as error:  # noqa: BLE001
            self.boundary.failed(f"on_ask({type(call.message).__name__})", error, call.message)
            if not call.done:
                call.fail("internal", f"{self.actor.role} failed to answer {type(call.message).__name__}")

    def _answer_system(self, call: IncomingCall) -> None:
        match call.message:
            case StatsRequest():
                call.reply(self.stats())
            case DescribeRequest():
                member = self._member
                uptime_s = self._loop.time() - self._started_at
                fields = {name: getattr(member, name) for name in member.__struct_fields__}
                call.reply(Describe(**fields, uptime_s=uptime_s))
            case Ping():
                call.reply(Pong())
            case Drain():
                self.boundary.spawn(self._drain_and_reply(call), "drain")
            case Shutdown():
                call.reply(ShuttingDown())
                self.end(call.message.reason)
            case _:
                call.fail(NOT_SERVED, f"{self.actor.role} does not answer {type(call.message).__name__}")

    async def _drain_and_reply(self, call: IncomingCall) -> None:
        await self.drain()
        call.reply(Drained())

    def stats(self) -> StatsReply:
        """What this actor answers to `StatsRequest`."""
        gauges = {
            "mesh_calls_pending": float(len(self.asking)),
            "mesh_mailbox_calls": float(len(self.serving)),
            "mesh_peers": float(len(self.links.peers())),
            "mesh_members": float(len(self.registration.view.all())),
            "mesh_uptime_seconds": self._loop.time() - self._started_at,
        }
        return self._figures.reply(self._loop.time(), gauges)

    def ticked(self) -> None:
        """It is time for a heartbeat."""
        self._figures.sample(self._loop.time())

    def _is_supervisor(self, sender: Address) -> bool:
        if self.options.supervisor is not None and self.options.supervisor[0] == sender:
            return True
        # Other hosts have theirs, and who was started by hand has none of its own.
        member = self.registration.view.get(sender.actor_id)
        return member is not None and member.address == sender and member.role == SUPERVISOR
