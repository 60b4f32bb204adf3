"""What an actor acts through."""

from collections.abc import Callable
from random import Random

from mesh.address import Endpoint
from mesh.calls.asking import Asking
from mesh.calls.tells import Tells
from mesh.errors import ActorFailed, MeshError
from mesh.link.links import Links
from mesh.membership.changes import Changes
from mesh.membership.incarnation import Incarnation
from mesh.membership.registration import Registration
from mesh.pubsub.publishing import Publishing
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.telemetry import current_trace, new_traceparent
from mesh.runtime.trace_ring import TraceRing
from mesh.wire.frames import StatsReply


class Context:
    """What an actor acts through; set as `Actor.ctx` before `start()`. Used on the event loop's thread only.

    Methods implemented elsewhere are bound here unchanged, and documented there:

        tell, tell_all                   `mesh/calls/tells.py`             send and forget
        ask                              `mesh/calls/asking.py`            send and wait for the reply
        ask_then                         `mesh/calls/asking.py`            send and be called back with the outcome
        publish, subscribe, unsubscribe  `mesh/pubsub/publishing.py`       topics
        later, spawn                     `mesh/runtime/task_supervisor.py` timers and tasks whose exceptions are caught
        announce, describe               `mesh/membership/incarnation.py`  what others are told about this actor
        stats                            `mesh/system.py`                  all its metrics
        bury                             `mesh/membership/changes.py`      for supervisors: an incarnation is dead
        credentials                      `mesh/membership/proof.py`        which members are proved and believed
    """

    def __init__(
        self,
        me: Incarnation,
        links: Links,
        tells: Tells,
        asking: Asking,
        publishing: Publishing,
        registration: Registration,
        changes: Changes,
        tasks: TaskSupervisor,
        stats: Callable[[int | None], StatsReply],
        random: Random,
        trace: TraceRing | None = None,
    ) -> None:
        self._me = me
        self._links = links
        self._registration = registration
        self._random = random
        self.address = me.address
        """This incarnation."""
        self.members = me.view
        """The cached view of who is in the mesh."""
        self.metrics = links.metrics
        """This actor's counters, gauges and histograms."""
        self.log = me.log
        """A logger bound to this actor and epoch."""
        self.trace = trace or TraceRing(tasks.now)
        """What this actor did last, for those who look into it from outside."""
        self.now = tasks.now
        """The loop's clock, seconds."""
        self.tell = tells.tell
        self.tell_all = tells.tell_all
        self.ask = asking.ask
        self.ask_then = asking.ask_then
        self.publish = publishing.publish
        self.subscribe = publishing.subscribe
        self.unsubscribe = publishing.unsubscribe
        self.later = tasks.later
        self.spawn = tasks.spawn
        self.announce = me.announce
        self.describe = me.describe
        self.bury = changes.bury
        self.credentials = me.credentials
        self.stats = stats

    @property
    def endpoint(self) -> Endpoint:
        return self.describe().endpoint

    @property
    def join_trouble(self) -> str:
        """Why the registry did not admit this actor at its last join; empty for a member."""
        return self._registration.trouble

    def suspect(self, actor_id: str) -> None:
        """An expected message from this peer is overdue: ping it. If it does not answer, it is lost."""
        self._links.suspect(actor_id)

    def end(self, reason: str, why: MeshError | None = None) -> None:
        """End this actor's process without a drain: what it depends on is gone. Its supervisor starts it again.

        `why` is raised by what runs the actor, and its supervisor is told; without it this is an end in good order.
        """
        if self._me.end(reason, why):
            self.log.warning("ending", why=reason)

    def fail(self, reason: str) -> None:
        """`end`, because something is broken and not merely gone: a death, with a restart, a code and a count of it."""
        self.end(reason, ActorFailed(reason))

    def traceparent(self) -> str:
        """The W3C trace context of the message being handled; starts a new trace if there is none."""
        trace = current_trace.get() or new_traceparent(self._random)
        current_trace.set(trace)
        return trace

    def continue_trace(self, traceparent: str) -> None:
        """Adopt a trace context from outside the mesh for the rest of this handler or task."""
        current_trace.set(traceparent)
