"""One actor's half of the mesh: wires links, calls, heartbeats, membership and topics to the actor, and answers
the asks that every actor gets (statistics, ping).

Uses the loop's clock, tasks and futures and a `Transport`, nothing else: no ZeroMQ, no threads, no wall clock, so it
runs unchanged on virtual time. Made by `mesh/run.py` for a process, by tests and simulations directly.

    new --start()--> starting --ready_after_start or announce()--> ready --drain()--> draining --stop()--> gone
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
from mesh.calls.serving import Serving
from mesh.calls.tells import Tells
from mesh.context import Context
from mesh.errors import MeshError, Superseded
from mesh.link.links import Links
from mesh.link.peer import SYSTEM, Peer
from mesh.membership.heartbeats import Heartbeats
from mesh.membership.permissions import Permissions
from mesh.membership.proof import REGISTRY, Credentials, without_proof
from mesh.membership.registration import Registration
from mesh.membership.view import (
    DRAINING,
    READY,
    STARTING,
    Bootstrap,
    LearningBootstrap,
    Member,
    MemberChange,
)
from mesh.options import SystemOptions
from mesh.pubsub.publishing import Publishing
from mesh.runtime.own_figures import OwnFigures
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Buffer, Channel, Transport
from mesh.wire.codec import BodyCodec
from mesh.wire.frames import (
    SYSTEM_CODEC,
    Draining,
    MembersChanged,
    PeerDown,
    Ping,
    Pong,
    StatsReply,
    StatsRequest,
)
from mesh.wire.header import Header, Verb

_LEAVE_S: Final = 0.25
"""The registry answers in milliseconds; if it is gone, the lease ends by itself in 5 s, and every stop would wait."""
_BYE_GRACE_S: Final = 1.0
"""Its last messages and its bye take milliseconds. If the bye is lost, callers wait so long for a peer that is gone."""


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
        self._bootstrap = LearningBootstrap(bootstrap)
        self.credentials = Credentials(
            self.options.secret,
            self.options.proof,
            lambda actor_id: self.registration.view.get(actor_id),
            self._known_hubs,
            self.options.vet_host,
        )
        self._member = Member(
            actor_id=address.actor_id,
            role=actor.role,
            epoch=address.epoch,
            endpoint=Endpoint("", ""),
            host=self.options.host,
            pid=self.options.pid or os.getpid(),
            attributes=self.options.attributes,
            proof=self.credentials.own(*address, actor.role),
        )
        self._shutdown: asyncio.Future[str] = self._loop.create_future()
        self._stopped = False
        self.over: MeshError | None = None
        """Why this incarnation is over, if the registry will never admit it: it knows a later one, for example."""

        self.tasks = TaskSupervisor(self._log, self.metrics)
        self._figures = OwnFigures(actor, self.metrics, self.tasks, self.options.usage)
        self.links = Links(address, transport, self, self.options, self.metrics, self.tasks)
        self._add_parts(actor)
        actor.ctx = Context(self, self._log)

    def _add_parts(self, actor: Actor) -> None:
        """Create the parts that speak over the links; each registers handlers for its verbs."""
        links, tasks, options = self.links, self.tasks, self.options
        bodies = BodyCodec(actor.codec, SYSTEM_CODEC, options.limits)
        # Without keys a role is merely what an actor calls itself.
        permissions = Permissions(actor.codec.senders, options.host) if options.vet_host is not None else None
        self.tells = Tells(links, bodies, actor, tasks, permissions)
        self.asking = Asking(links, bodies, options.max_pending_calls, tasks)
        self.serving = Serving(links, bodies, actor, tasks, permissions, options.mailbox_capacity)
        self.publishing = Publishing(links, self.tells, actor, tasks, options)
        self.registration = Registration(
            self.asking, self._bootstrap, options, self.describe, self.members_changed, self._is_over, tasks
        )
        self.heartbeats = Heartbeats(
            links,
            actor,
            tasks,
            options,
            hubs=self._hubs,
            state=lambda: self._member.state,
            ticked=lambda: self._figures.sample(self._loop.time()),
            answered=self.registration.heartbeat,
        )
        links.handlers[Verb.DRAINING] = self._on_draining
        self.tells.of_system |= {
            MembersChanged: self.registration.members_changed,
            PeerDown: self._on_peer_down,
        }
        self.serving.of_system |= {
            StatsRequest: lambda call: call.reply(self.stats()),
            Ping: lambda call: call.reply(Pong()),
        }

    async def start(self) -> None:
        """Bind, begin to join, start the actor. If the actor's `start` raises, stop and re-raise."""
        endpoint = await self._transport.start(self.address, self.links)
        self._member = msgspec.structs.replace(self._member, endpoint=endpoint)
        try:
            # Before the actor's own start, which may load weights for minutes: heartbeats report its progress, and
            # progress extends the time that the supervisor allows it.
            self.heartbeats.start()
            if self.actor.joins:
                self.registration.start()
            await self.actor.start()
        except BaseException:
            # Also if it is cancelled: the transport's sockets and files must not stay behind.
            await self.stop()
            raise
        if self.actor.ready_after_start and self._member.state == STARTING:
            self.announce(READY)

    async def joined(self) -> None:
        """Wait until the registry has admitted this actor."""
        await self.registration.joined()

    async def drain(self) -> None:
        """Take no new work and wait until the actor has none left."""
        self.announce(DRAINING)
        body = SYSTEM_CODEC.encode(Draining())
        for peer in self.links.peers():
            self.links.send(peer, Channel.CONTROL, Verb.DRAINING, body, (), SYSTEM)
        await self.actor.drain()

    async def stop(self) -> None:
        """Leave the mesh, say bye, release everything. Idempotent; does not wait for work, see `drain`."""
        if self._stopped:
            return
        self._stopped = True
        self.heartbeats.close()
        self.publishing.close()
        try:
            await self.actor.stop()
        except Exception as error:  # noqa: BLE001
            # What follows (leave, bye, sockets) must be done however the actor's own end went.
            self.tasks.failed("stop", error)
        await self.tasks.close()
        # After the actor's own `stop`, which may still answer some calls; the remaining askers get an error.
        self.serving.close()
        if self.actor.joins:
            # Before `asking` is closed: the leave is an ask.
            await self.registration.leave(_LEAVE_S)
        self.asking.close()
        self.links.close()
        await self._transport.stop()
        self.end("stopped")

    def end(self, reason: str) -> bool:
        """Have the program that runs this actor end it. False: this was requested before."""
        if self._shutdown.done():
            return False
        self._shutdown.set_result(reason)
        return True

    async def shutdown_asked(self) -> str:
        """Wait until the end of this actor is requested (or it has stopped); returns the reason."""
        return await asyncio.shield(self._shutdown)

    # For the parts of the system

    def describe(self) -> Member:
        """This actor as a member."""
        return self._member

    def introduce(self, to: Address, *, is_proved: bool) -> Member:
        """This actor as a member, with its proof if the peer is proved, a hub, or a member known to have a proof."""
        is_shown = is_proved or self.credentials.are_shown_to(to)
        return self._member if is_shown else without_proof(self._member)

    def vet(self, member: Member) -> bool:
        """Whether the member that introduces itself is proved; raises `FrameRefused` if it must be and is not."""
        return self.credentials.vet(member)

    def announce(self, state: str | None = None, **attributes: Any) -> None:
        """Tell registry and supervisor about a new state or new attributes (merged into the existing ones).

        A draining actor never becomes ready again.
        """
        member = self._member
        if state is None or member.state == DRAINING:
            state = member.state
        self._member = msgspec.structs.replace(member, state=state, attributes={**member.attributes, **attributes})
        self.registration.announce()
        if state != member.state:
            # The supervisor waits for the state, and would otherwise hear it up to half a second later.
            self.heartbeats.send_now()

    def locate(self, actor_id: str) -> tuple[Address, Endpoint] | None:
        """Where an actor is: the registry from the bootstrap, the supervisor from the options, others from the view.

        Actors on the same host are dialed by their local endpoints, not over the network.
        """
        # The options and files that name these two hold local endpoints only on the host these belong to.
        for known in (self.options.supervisor, self._bootstrap.lookup()):
            if known is not None and known[0].actor_id == actor_id:
                return known[0], known[1].on_its_host
        member = self.registration.view.get(actor_id)
        if member is None:
            return None
        is_near = member.host == self._member.host
        return member.address, member.endpoint.on_its_host if is_near else member.endpoint

    def linked(self, peer: Address) -> None:
        """A connection with an incarnation is up: subscriptions that wait for its return are requested now."""
        self.publishing.linked(peer.actor_id)

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """An incarnation is gone or cut off: fail whatever waits for it, then tell the actor."""
        self._log.debug("peer lost", peer=str(peer.address), reason=reason)
        # The actor last: whatever it does about the loss then finds all state up to date.
        self.asking.lose(peer, reason)
        self.serving.lose(peer, reason)
        self.publishing.lose(peer)
        self.registration.peer_lost(peer.address)
        self.tasks.call("on_peer_lost", self.actor.on_peer_lost, peer.address, reason)

    def found(self, address: Address) -> None:
        """A later incarnation answers where a peer was dialed: if it is the registry's, join it at once."""
        if self._bootstrap.learn(address):
            self.registration.hurry()

    def superseded(self, by: Address, reason: str, known_epoch: int, *, is_proved: bool) -> None:
        """A peer knows a later incarnation of this actor. If the registry says so, this one is over.

        A registry believes any peer that may have been its member: otherwise a registry that has lost both its files
        and the right time would be dialed by its earlier epoch for ever, and by nobody under its present one.
        """
        # The next incarnation is started above `known_epoch`. Without it an actor whose host has lost its files, or
        # whose clock is a day behind, would be refused until the lease of its predecessor had run out, and would then
        # reuse epochs that the predecessor has had.
        self._is_over(by, Superseded(reason, known_epoch), is_proved=is_proved)

    def members_changed(self, change: MemberChange, leaving: Collection[Address] = ()) -> None:
        """The view has changed: end links with members that left, subscribe to topics of members that joined.

        An empty change does nothing. Members in `leaving` left in an orderly way; the registry's notice may overtake
        their last messages, so their bye is awaited for a while.
        """
        if not change:
            return
        for member in change.left:
            if member.address in leaving:
                self._loop.call_later(_BYE_GRACE_S, self.links.lose, member.address, "it left the mesh")
            else:
                self.links.lose(member.address, "it left the mesh")
        self.tasks.call("on_members", self.actor.on_members, change.joined, change.left, change.changed)
        for member in change.joined:
            self.publishing.appeared(member.actor_id)

    def bury(self, dead: Address, reason: str) -> None:
        """An incarnation is dead: drop its membership and its links at once, before the registry says so."""
        self.links.lose(dead, reason)
        self.members_changed(self.registration.view.forget(dead))

    def _known_hubs(self) -> list[str]:
        supervisor, registry = self.options.supervisor, self._bootstrap.lookup()
        return [where[0].actor_id for where in (supervisor, registry) if where is not None]

    def _hubs(self) -> list[str]:
        hubs = [self.options.supervisor[0].actor_id] if self.options.supervisor is not None else []
        registry = self.registration.registry
        return [*hubs, registry.actor_id] if registry is not None else hubs

    def _is_over(self, by: Address, why: MeshError, *, is_proved: bool = False) -> None:
        registry = self._bootstrap.lookup()
        known_epoch = why.known_epoch if isinstance(why, Superseded) else 0
        is_said = registry is not None and registry[0] == by
        if self.actor.role == REGISTRY:
            is_said = self.credentials.believe(by, is_proved=is_proved) and self.actor.is_outlived(by, known_epoch)
        if is_said and self.end(why.code):
            self.over = why
            self._log.warning(why.code, by=str(by), why=why.message, known_epoch=known_epoch)

    # Tells and asks that every actor handles

    def _on_peer_down(self, sender: Address, message: PeerDown) -> bool:
        peer = self.links.get(sender.actor_id)
        if peer is None or not self.registration.may_say_dead(sender, message):
            return False
        if not self.credentials.believe(sender, is_proved=peer.is_proved):
            return False
        self.bury(Address(message.actor_id, message.epoch), message.reason or "its supervisor reported it dead")
        self.tasks.call("on_peer_down", self.actor.on_peer_down, sender, message)
        return True

    def _on_draining(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        self.members_changed(self.registration.view.mark_draining(peer.address))

    def stats(self) -> StatsReply:
        """All metrics of this actor, as reported to others."""
        gauges = {
            "mesh_calls_pending": float(len(self.asking)),
            "mesh_mailbox_calls": float(len(self.serving)),
            "mesh_peers": float(len(self.links.peers())),
            "mesh_members": float(len(self.registration.view.all())),
            "mesh_uptime_seconds": self._loop.time() - self._started_at,
        }
        return self._figures.reply(self._loop.time(), gauges)
