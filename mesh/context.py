"""What an actor acts through."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from mesh.address import Address, Endpoint
from mesh.calls.streaming import Stream
from mesh.runtime.telemetry import Metrics, current_trace, new_traceparent

if TYPE_CHECKING:
    from mesh.membership.view import Membership
    from mesh.system import ActorSystem


class Context:
    """What an actor acts through; set as `Actor.ctx` before `start()`. Used on the event loop's thread only.

    What is done elsewhere is bound here as it is, and described there:

        tell, tell_all                   `mesh/calls/tells.py`             send and forget
        ask                              `mesh/calls/asking.py`            send and wait for the reply
        ask_then                         `mesh/calls/asking.py`            send and be called back with the outcome
        stream                           `mesh/calls/streaming.py`         send and iterate over the items of the answer
        publish, subscribe, unsubscribe  `mesh/pubsub/publishing.py`       topics
        later, spawn                     `mesh/runtime/task_supervisor.py` timers and tasks whose exceptions are caught
        announce, describe, stats        `mesh/system.py`                  what others are told of this actor
        bury                             `mesh/system.py`                  who is dead, as its supervisor knows
        credentials                      `mesh/membership/proof.py`        who is proved, and whose word counts
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
        """Bound to this actor and epoch."""
        self.now = asyncio.get_running_loop().time
        """The loop's clock, seconds."""
        self.tell = system.tells.tell
        self.tell_all = system.tells.tell_all
        self.ask = system.asking.ask
        self.ask_then = system.asking.ask_then
        self.stream = partial(Stream, system.asking)
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
        """Why the registry does not take this actor in, as of the last join; empty for a member."""
        return self._system.registration.trouble

    def suspect(self, actor_id: str) -> None:
        """What had to come from this peer did not: have it asked whether it is there. If not, it is lost."""
        self._system.links.suspect(actor_id)

    def end(self, reason: str) -> None:
        """End this actor's process without a drain: what it stands on is gone. Its supervisor starts it anew."""
        if self._system.end(reason):
            self.log.warning("ending", why=reason)

    def capabilities(self, actor_id: str) -> dict[str, Any]:
        """What a linked peer said of itself in `hello` or `welcome`; empty if there is no link yet."""
        peer = self._system.links.get(actor_id)
        return {} if peer is None else peer.capabilities

    def traceparent(self) -> str:
        """The W3C trace context of what is being handled; starts a new trace where there is none."""
        trace = current_trace.get()
        if not trace:
            trace = new_traceparent(self._system.options.random)
            current_trace.set(trace)
        return trace

    def continue_trace(self, traceparent: str) -> None:
        """Take over a trace context that came from outside the mesh for the rest of this handler or task."""
        current_trace.set(traceparent)
