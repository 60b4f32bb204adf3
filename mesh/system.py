"""One actor's half of the mesh: wires links, calls, heartbeats, membership and topics to the actor, and answers
the asks that every actor gets (statistics, ping).

Uses the loop's clock, tasks and futures and a `Transport`, nothing else: no ZeroMQ, no threads, no wall clock, so it
runs unchanged on virtual time. Made by `mesh/run.py` for a process, by tests and simulations directly.

    new --start()--> starting --ready_after_start or announce()--> ready --drain()--> draining --stop()--> gone
"""

from typing import Final

from mesh.actor import Actor
from mesh.address import Address
from mesh.calls.asking import Asking
from mesh.calls.serving import Serving
from mesh.calls.tells import Tells
from mesh.context import Context
from mesh.errors import DrainFailed, MeshError
from mesh.link.links import Links
from mesh.link.peer import Peer
from mesh.membership.changes import Changes
from mesh.membership.heartbeats import Heartbeats
from mesh.membership.incarnation import Incarnation
from mesh.membership.permissions import Permissions
from mesh.membership.registration import Registration
from mesh.membership.view import DRAINING, READY, STARTING, Bootstrap
from mesh.options import SystemOptions
from mesh.pubsub.publishing import Publishing
from mesh.runtime.own_figures import OwnFigures
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Transport
from mesh.wire.codec import BodyCodec
from mesh.wire.frames import SYSTEM_CODEC, MembersChanged, PeerDown, Ping, Pong, StatsReply, StatsRequest

_LEAVE_S: Final = 0.25
"""The registry answers in milliseconds; if it is gone, the lease ends by itself in 5 s, and every stop would wait."""


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
        self.metrics = Metrics()
        self._transport = transport
        self._stopped = False
        options = options or SystemOptions()
        self.incarnation = me = Incarnation(address, actor, options, bootstrap)
        self.describe, self.announce, self.shutdown_asked = me.describe, me.announce, me.end_asked
        self.tasks = TaskSupervisor(me.log, self.metrics)
        self._started_at = self.tasks.now()
        self._figures = OwnFigures(actor, self.metrics, self.tasks, options.usage)
        self.links = Links(address, transport, me, options, self.metrics, self.tasks)
        self._add_parts(actor, options)

    def _add_parts(self, actor: Actor, options: SystemOptions) -> None:
        me, links, tasks = self.incarnation, self.links, self.tasks
        bodies = BodyCodec(actor.codec, SYSTEM_CODEC, options.limits)
        # Without keys a role is merely what an actor calls itself.
        permissions = Permissions(actor.codec.senders, options.host) if options.vet_host is not None else None
        self.tells = tells = Tells(links, bodies, actor, tasks, permissions)
        self.asking = asking = Asking(links, bodies, options.max_pending_calls, tasks)
        self.serving = Serving(links, bodies, actor, tasks, permissions, options.mailbox_capacity)
        self.publishing = publishing = Publishing(links, tells, actor, tasks, options)
        self._changes = changes = Changes(me, links, publishing, actor, tasks)
        self.registration = registration = Registration(asking, me, changes.members_changed, options, tasks)
        self.joined = registration.joined
        self.heartbeats = Heartbeats(links, actor, me, registration, self._figures, tasks, options.heartbeat_s)
        links.when_linked, links.when_lost = publishing.linked, self._peer_lost
        links.when_found, links.when_superseded = registration.found, me.superseded
        # The supervisor waits for the state, and would otherwise hear it up to half a second later.
        me.when_announced, me.when_state_changed = registration.announce, self.heartbeats.send_now
        tells.of_system |= {
            MembersChanged: registration.members_changed,
            PeerDown: lambda sender, down: registration.may_say_dead(sender, down) and changes.peer_down(sender, down),
        }
        self.serving.of_system |= {
            StatsRequest: lambda call: call.reply(self.stats(call.message.history_after)),
            Ping: lambda call: call.reply(Pong()),
        }
        actor.ctx = Context(
            me,
            links,
            tells,
            asking,
            publishing,
            registration,
            changes,
            tasks,
            self.stats,
            options.random,
            options.trace,
        )

    @property
    def over(self) -> MeshError | None:
        """Why this incarnation is over, see `Incarnation.over`."""
        return self.incarnation.over

    async def start(self) -> None:
        """Bind, begin to join, start the actor. If the actor's `start` raises, stop and re-raise."""
        endpoint = await self._transport.start(self.address, self.links)
        self.incarnation.listens(endpoint)
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
        if self.actor.ready_after_start and self.describe().state == STARTING:
            self.announce(READY)

    async def drain(self) -> None:
        """Take no new work; return when all accepted work is done. Raises DrainFailed if the actor's `drain` raises.

        Then all open calls are answered (`stopping`, retryable), and what remains is to stop.
        """
        self.announce(DRAINING)
        self._changes.say_draining()
        try:
            await self.actor.drain()
        # Whatever it is, it is typed here, and askers are answered first.
        except Exception as error:
            self.tasks.failed("drain", error)
            # Nobody knows any more when these would be done.
            self.serving.close()
            why = f"the drain of {self.address} failed ({type(error).__name__}); its log has the traceback"
            raise DrainFailed(why) from error

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
        self.incarnation.end("stopped")

    def _peer_lost(self, peer: Peer, reason: str) -> None:
        self.incarnation.log.debug("peer lost", peer=str(peer.address), reason=reason)
        # The actor last: whatever it does about the loss then finds all state up to date.
        self.asking.lose(peer, reason)
        self.serving.lose(peer, reason)
        self.publishing.lose(peer)
        self.registration.peer_lost(peer.address)
        self.heartbeats.lost(peer.address)
        self.tasks.call("on_peer_lost", self.actor.on_peer_lost, peer.address, reason)

    def stats(self, history_after: int | None = None) -> StatsReply:
        now = self.tasks.now()
        gauges = {
            "mesh_calls_pending": float(len(self.asking)),
            "mesh_mailbox_calls": float(len(self.serving)),
            "mesh_peers": float(len(self.links.peers())),
            "mesh_members": float(len(self.registration.view.all())),
            "mesh_uptime_seconds": now - self._started_at,
        }
        for address, since_s in self.links.unreached().items():
            # Of the dead too, until the next dial: only who should be there is told.
            member = self.registration.view.get(address.actor_id)
            if member is not None and member.address == address:
                gauges[f'mesh_unreached_seconds{{peer="{address.actor_id}"}}'] = since_s
        return self._figures.reply(now, gauges, history_after)
