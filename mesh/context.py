"""What an actor acts through: `mesh.actor.Context` over an `ActorSystem`. Made by the system, one per actor."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.actor import Answer, AnyMessage
from mesh.address import Address, Endpoint
from mesh.calls.streaming import Stream
from mesh.errors import CallError
from mesh.link.peer import PLAIN, SYSTEM
from mesh.membership.view import Member, Membership
from mesh.runtime.telemetry import Metrics, current_trace, new_traceparent
from mesh.transport.base import Buffer, Lane
from mesh.wire.frames import StatsReply, Unsubscribe
from mesh.wire.header import Verb

if TYPE_CHECKING:
    from types import CoroutineType

    from mesh.system import ActorSystem

_TELL: Final = Verb.TELL


class ActorContext:
    """Implements `mesh.actor.Context`, where each method is described."""

    def __init__(self, system: "ActorSystem", log: structlog.stdlib.BoundLogger) -> None:
        self._system = system
        self._loop = asyncio.get_running_loop()
        self.address: Address = system.address
        self.members: Membership = system.registration.view
        self.metrics: Metrics = system.metrics
        self.log = log
        self.now: Callable[[], float] = self._loop.time

    @property
    def endpoint(self) -> Endpoint:
        """Where this actor listens."""
        return self._system.describe().endpoint

    def describe(self) -> Member:
        """This actor as it is known to others."""
        return self._system.describe()

    def doubt(self, actor_id: str) -> None:
        """Have a peer probed; without a link there is nobody to doubt."""
        peer = self._system.links.get(actor_id)
        if peer is not None:
            self._system.doubt(peer.address)

    def end(self, reason: str) -> None:
        """End this actor."""
        if self._system.end(reason):
            self.log.warning("ending", why=reason)

    def tell(
        self, actor_id: str, message: AnyMessage, buffers: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA
    ) -> bool:
        """Send and forget."""
        system = self._system
        try:
            body, flags = system.wording.encode(message, buffers)
            peer = system.links.reach(actor_id)
        except CallError as error:
            self.metrics.count("mesh_tells_dropped_total", code=error.code)
            return False
        return system.links.send(peer, lane, _TELL, body, buffers, SYSTEM if flags else PLAIN)

    def ask(
        self,
        actor_id: str,
        message: AnyMessage,
        *,
        timeout_s: float,
        buffers: Sequence[Buffer] = (),
        lane: Lane = Lane.CONTROL,
    ) -> "CoroutineType[Any, Any, Answer]":
        """Send and wait for the reply."""
        return self._system.asking.ask(actor_id, message, timeout_s, buffers, lane)

    def stream(
        self,
        actor_id: str,
        message: AnyMessage,
        *,
        timeout_s: float,
        window: int = 32,
        buffers: Sequence[Buffer] = (),
        lane: Lane = Lane.DATA,
    ) -> AsyncIterator[Answer]:
        """Send and iterate over the items of the answer."""
        asking = self._system.asking
        return Stream(asking, actor_id, message, timeout_s=timeout_s, window=window, buffers=buffers, lane=lane)

    def publish(self, topic: str, message: AnyMessage) -> int:
        """Send to all subscribers and keep for replay."""
        return self._system.publishing.publish(topic, message)

    def subscribe(self, actor_id: str, topic: str) -> None:
        """Follow a topic."""
        self._system.publishing.subscribe(actor_id, topic)

    def unsubscribe(self, actor_id: str, topic: str) -> None:
        """Follow it no longer."""
        if self._system.publishing.unsubscribe(actor_id, topic):
            self.tell(actor_id, Unsubscribe(topic=topic))

    def announce(self, state: str | None = None, **attributes: Any) -> None:
        """Tell registry and supervisor about a new state or new attributes."""
        self._system.announce(state, attributes)

    def capabilities(self, actor_id: str) -> dict[str, Any]:
        """What a linked peer said of itself in `hello` or `welcome`; empty if there is no link yet."""
        peer = self._system.links.get(actor_id)
        return {} if peer is None else peer.capabilities

    def later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        """Call back after a time."""
        return self._system.boundary.later(delay_s, callback, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Task[Any]:
        """Run a coroutine as a task of this actor."""
        return self._system.boundary.spawn(coroutine, name)

    def traceparent(self) -> str:
        """The W3C trace context of what is being handled."""
        trace = current_trace.get()
        if not trace:
            trace = new_traceparent(self._system.options.random)
            current_trace.set(trace)
        return trace

    def stats(self) -> StatsReply:
        """All figures of this actor."""
        return self._system.stats()

    def continue_trace(self, traceparent: str) -> None:
        """Take over a trace context that came from outside the mesh."""
        current_trace.set(traceparent)
