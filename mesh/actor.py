"""What an actor is, and what it is given: `Actor` to subclass, `Context` to act through, `Call` to answer.

Every role is one `Actor` class whose handlers translate between frames and a pure core. Handlers run one at a time on
the event loop's thread and must not block. The same class runs on ZeroMQ, in one process, and in the simulation.
`Context` and `Call` are the seam: `mesh/context.py` and `mesh/calls/serving.py` implement them over an `ActorSystem`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import structlog

from mesh.address import Address, Endpoint
from mesh.errors import NOT_SERVED
from mesh.membership.view import Member, Membership
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Buffer, Lane
from mesh.wire.codec import Codec
from mesh.wire.frames import Heartbeat, StatsReply
from mesh.wire.message import HotMessage, Message

AnyMessage = Message | HotMessage


class Answer(NamedTuple):
    """A reply, or one item of a stream. `buffers` are valid as long as they are referenced."""

    message: Any
    buffers: Sequence[Buffer]
    sender: Address


class Call(Protocol):
    """One ask or stream that an actor has to answer: exactly once, now or later.

    A call that its handler forgets is answered by its deadline at the asker, and its place in the mailbox is freed.
    """

    @property
    def sender(self) -> Address:
        """Who asks."""
        ...

    @property
    def message(self) -> Any:
        """What is asked, decoded by the actor's codec."""
        ...

    @property
    def buffers(self) -> Sequence[Buffer]:
        """Raw parts that came with it."""
        ...

    @property
    def deadline(self) -> float:
        """When the asker stops waiting, on the scale of `Context.now()`."""
        ...

    @property
    def traceparent(self) -> str:
        """The asker's W3C trace context; empty if it has none."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether items are expected rather than one reply."""
        ...

    @property
    def done(self) -> bool:
        """Answered, failed, cancelled, past its deadline, or the asker is gone."""
        ...

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        ...

    def reply(self, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Answer an ask. On a call that is done: ignored and counted."""
        ...

    def fail(self, code: str, message: str, *, retryable: bool = False, param: str | None = None) -> None:
        """Answer with an error, which the asker sees as `RemoteError`."""
        ...

    async def item(self, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Send the next item of a stream once there is credit.

        Raises `Cancelled`, `DeadlineExceeded`, or `PeerLost` when nobody wants it any more.
        """
        ...

    def end(self) -> None:
        """All items of a stream have been sent."""
        ...

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call back when the asker cancels, is lost, or the deadline passes before the answer."""
        ...


class Context(Protocol):
    """What an actor acts through. Set as `Actor.ctx` before `start()`."""

    @property
    def address(self) -> Address:
        """This incarnation."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """Where this incarnation listens."""
        ...

    def describe(self) -> Member:
        """This actor as it is known to others."""
        ...

    @property
    def members(self) -> Membership:
        """The cached view of who is in the mesh."""
        ...

    @property
    def metrics(self) -> Metrics:
        """This actor's counters, gauges and histograms."""
        ...

    @property
    def log(self) -> structlog.stdlib.BoundLogger:
        """A logger bound to this actor and epoch."""
        ...

    def now(self) -> float:
        """The loop's clock, seconds."""
        ...

    def doubt(self, actor_id: str) -> None:
        """What had to come from this peer did not: have it asked whether it is there. If not, it is lost."""
        ...

    def end(self, reason: str) -> None:
        """End this actor's process without a drain: what it stands on is gone. Its supervisor starts it anew."""
        ...

    def tell(
        self, actor_id: str, message: AnyMessage, buffers: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA
    ) -> bool:
        """Send and forget. False, counted: unknown peer, or the way to it is full. FIFO per receiver and lane."""
        ...

    async def ask(
        self,
        actor_id: str,
        message: AnyMessage,
        *,
        timeout_s: float,
        buffers: Sequence[Buffer] = (),
        lane: Lane = Lane.CONTROL,
    ) -> Answer:
        """Send and wait for the reply; raises a `CallError`, at the deadline at the latest.

        Cancelling the task sends `cancel` to the peer.
        """
        ...

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
        """Send and iterate over the items of the answer, at most `window` of them unread; raises as `ask` does.

        Leaving the iteration early cancels at the peer.
        """
        ...

    def publish(self, topic: str, message: AnyMessage) -> int:
        """Send to all subscribers and keep for replay; returns the sequence number, from 1."""
        ...

    def subscribe(self, actor_id: str, topic: str) -> None:
        """Follow a topic, now or as soon as the peer is a member, over all its restarts."""
        ...

    def unsubscribe(self, actor_id: str, topic: str) -> None:
        """Follow it no longer."""
        ...

    def announce(self, state: str | None = None, **attributes: Any) -> None:
        """Tell registry and supervisor about a new state or new attributes (merged into the old)."""
        ...

    def capabilities(self, actor_id: str) -> dict[str, Any]:
        """What a linked peer said of itself in `hello` or `welcome`; empty if there is no link yet."""
        ...

    def later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        """Call back after a time; exceptions go to the supervision boundary."""
        ...

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Task[Any]:
        """Run a coroutine as a task of this actor: cancelled at stop, exceptions logged and counted."""
        ...

    def traceparent(self) -> str:
        """The W3C trace context of what is being handled; starts a new trace where there is none."""
        ...

    def continue_trace(self, traceparent: str) -> None:
        """Take over a trace context that came from outside the mesh for the rest of this handler or task."""
        ...

    def stats(self) -> StatsReply:
        """All figures of this actor, as others are told them."""
        ...


class Actor:
    """Base class of all actors; subclasses override what they need.

    An exception in a handler is caught at the supervision boundary, counted
    (`mesh_handler_errors_total`) and logged; in `on_ask` it becomes the error reply `internal`.
    """

    role: ClassVar[str] = ""
    codec: ClassVar[Codec]
    ready_after_start: ClassVar[bool] = True
    """False: the actor announces `ready` itself."""
    system_asks: ClassVar[tuple[type, ...]] = ()
    """Bodies of the mesh's own frames that this actor answers in `on_ask` (the registry: `Join`, `Leave`)."""
    joins: ClassVar[bool] = True
    """False: the system does not join it to the registry (the registry itself, supervisors, tools)."""

    ctx: Context

    async def start(self) -> None:
        """Take own resources. When it returns the actor is announced `ready`, see `ready_after_start`."""

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        """A message came. Default: counted and dropped."""
        self.ctx.metrics.count("mesh_unhandled_total", type=type(message).__name__)

    def on_ask(self, call: Call) -> None:
        """A call came. Must end in `call.reply()`, `call.fail()` or `call.end()`, now or later."""
        call.fail(NOT_SERVED, f"{self.role} does not answer {type(call.message).__name__}")

    def on_publication(self, publisher: Address, topic: str, sequence: int, message: Any) -> None:
        """The next publication of a topic this actor subscribes to; without gap or repeat since the last reset."""

    def on_subscription_reset(self, publisher: Address, topic: str) -> None:
        """What follows does not continue what came before: a new publisher epoch, or a gap no replay can fill."""

    def on_subscriber_reset(self, subscriber: Address, topic: str) -> None:
        """A subscriber of a topic published here has missed more than is kept of it, and starts from nothing.

        What it has to know is to be published again; nobody else does that.
        """

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        """An incarnation that this actor had a link to is gone or cut off."""

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        """The view of the mesh changed; `ctx.members` already says so."""

    def on_heartbeat(self, peer: Address, state: str, progress: str) -> None:
        """A peer that this actor is a hub of is alive and in this state (registry and supervisors).

        `progress` is what it says of what takes long, see there.
        """

    def progress(self) -> str:
        """How far this actor is with what takes long, in words for people; empty if there is nothing to say.

        Asked with every heartbeat. A start that says something new is given its whole time again by the supervisor.
        """
        return ""

    def heartbeat_to(self, peer: Address) -> Heartbeat:
        """What is answered to a heartbeat of `peer`; called after `on_heartbeat`."""
        return Heartbeat()

    async def drain(self) -> None:
        """Take no new work; return when what was taken is done."""

    async def stop(self) -> None:
        """Give back own resources. Called once, also after a `start` that failed half way."""

    def totals(self) -> dict[str, float]:
        """What only rises, by a name without `_total`: `/metrics` then has its rate, `NAME_per_second`, the mean of the
        last ten seconds. Called with every heartbeat, so it should cost nothing.
        """
        return {}

    def stats(self) -> dict[str, float]:
        """Gauges of this moment, keyed by name as in `/metrics` (`mesh_pages_free` or `mesh_pages{state="free"}`)."""
        return {}
