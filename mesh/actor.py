"""What an actor is, and what it is given: `Actor` to subclass, `Context` to act through, `Call` to answer.

Every role is one `Actor` class whose handlers translate between frames and a pure core. Handlers run one at a time on
the event loop's thread and must not block. The same class runs on ZeroMQ and in the simulation.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from mesh.address import Address
from mesh.calls.asking import Answer
from mesh.calls.serving import Call
from mesh.context import Context
from mesh.errors import NOT_SERVED
from mesh.membership.view import Member
from mesh.transport.base import Buffer
from mesh.wire.codec import Codec
from mesh.wire.frames import Heartbeat, PeerDown

__all__ = ["Actor", "Answer", "Call", "Context"]


class Actor:
    """Base class of all actors; subclasses override what they need.

    An exception in a handler is caught by its `TaskSupervisor`, counted
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

    def on_peer_down(self, sender: Address, down: PeerDown) -> None:
        """Somebody whose word counts has said that an incarnation is dead; links and `ctx.members` are rid of it."""

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        """The view of the mesh changed; `ctx.members` already says so."""

    def on_heartbeat(self, peer: Address, state: str, progress: str) -> None:
        """A peer that this actor is a hub of is alive and in this state (registry and supervisors).

        `progress` is what it says of what takes long.
        """

    def is_outlived(self, by: Address, epoch: int) -> bool:
        """Whether this incarnation is over since a peer dials a later `epoch` of it: asked of the registry alone.

        Of the others the registry says so.
        """
        return True

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
