"""What an actor acts through."""

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from mesh.address import Address, Endpoint
from mesh.runtime.telemetry import Metrics, current_trace, new_traceparent

if TYPE_CHECKING:
    from mesh.membership.view import Membership
    from mesh.system import ActorSystem


class Context:
    """What an actor acts through; set as `Actor.ctx` before `start()`. Used on the event loop's thread only.

    Methods implemented elsewhere are bound here unchanged, and documented there:

        tell, tell_all                   `mesh/calls/tells.py`             send and forget
        ask                              `mesh/calls/asking.py`            send and wait for the reply
        ask_then                         `mesh/calls/asking.py`            send and be called back with the outcome
        publish, subscribe, unsubscribe  `mesh/pubsub/publishing.py`       topics
        later, spawn                     `mesh/runtime/task_supervisor.py` timers and tasks whose exceptions are caught
        announce, describe, stats        `mesh/system.py`                  what others are told about this actor
        bury                             `mesh/system.py`                  for supervisors: an incarnation is dead
        credentials                      `mesh/membership/proof.py`        which members are proved and believed
    """

    def __init__(self, system: "ActorSystem", log: structlog.stdlib.BoundLogger) -> None:
        self._system = system
        self.address: Address = system.address
        """This incarnation."""
        self.members: Membership = system.registration.view
        """The cached view of who is in the mesh."""
        self.metrics: Metrics = system.metrics
        """This actor's counters, gauges and histograms."""
        self.log = log
        """A logger bound to this actor and epoch."""
        self.now = asyncio.get_running_loop().time
        """The loop's clock, seconds."""
        self.tell = system.tells.tell
        self.tell_all = system.tells.tell_all
        self.ask = system.asking.ask
        self.ask_then = system.asking.ask_then
        self.publish = system.publishing.publish
        self.subscribe = system.publishing.subscribe
        self.unsubscribe = system.publishing.unsubscribe
        self.later = system.tasks.later
        self.spawn = system.tasks.spawn
        self.announce = system.announce
        self.describe = system.describe
        self.bury = system.bury
        self.credentials = system.credentials
        self.stats = system.stats

    @property
    def endpoint(self) -> Endpoint:
        """Where this incarnation listens."""
        return self.describe().endpoint

    @property
    def join_trouble(self) -> str:
        """Why the registry did not admit this actor at its last join; empty for a member."""
        return self._system.registration.trouble

    def suspect(self, actor_id: str) -> None:
        """An expected message from this peer is overdue: ping it. If it does not answer, it is lost."""
        self._system.links.suspect(actor_id)

    def end(self, reason: str) -> None:
        """End this actor's process without a drain: what it depends on is gone. Its supervisor starts it again."""
        if self._system.end(reason):
            self.log.warning("ending", why=reason)

    def capabilities(self, actor_id: str) -> dict[str, Any]:
        """The capabilities that a linked peer stated in `hello` or `welcome`; empty if there is no link yet."""
        peer = self._system.links.get(actor_id)
        return {} if peer is None else peer.capabilities

    def traceparent(self) -> str:
        """The W3C trace context of the message being handled; starts a new trace if there is none."""
        trace = current_trace.get()
        if not trace:
            trace = new_traceparent(self._system.options.random)
            current_trace.set(trace)
        return trace

    def continue_trace(self, traceparent: str) -> None:
        """Adopt a trace context from outside the mesh for the rest of this handler or task."""
        current_trace.set(traceparent)
