"""What the mesh needs to know of an actor, and what it calls when something happens.

Handlers run one at a time on the event loop's thread and must not block. Subclasses derive from `Actor`
(`mesh/actor.py`).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from mesh.address import Address
from mesh.calls.serving import Call
from mesh.errors import NOT_SERVED
from mesh.link.peer import Peer
from mesh.membership.view import Member
from mesh.transport.base import Buffer
from mesh.wire.codec import Codec
from mesh.wire.frames import Heartbeat, PeerDown, Renewed


class Handlers:
    """What the mesh uses of an actor. A handler's error is counted and logged; to an ask it answers `internal`."""

    role: ClassVar[str] = ""
    codec: ClassVar[Codec]
    ready_after_start: ClassVar[bool] = True
    """If False, the actor announces `ready` itself."""
    system_asks: ClassVar[tuple[type, ...]] = ()
    """Bodies of the mesh's own frames that this actor answers in `on_ask` (the registry: `Join`, `Leave`, …)."""
    joins: ClassVar[bool] = True
    """If False, the system does not join it to the registry (the registry itself, `meshctl` as a client)."""
    kept: ClassVar[tuple[str, ...]] = ()
    """Gauges of `stats` and histograms of which ten minutes are kept; of an actor that names any, its rates, too."""

    async def start(self) -> None:
        """Acquire the actor's own resources. On return the actor is announced `ready`; see `ready_after_start`."""

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        """A message arrived. By default an `Actor` counts and drops it."""

    def on_ask(self, call: Call) -> None:
        """A call arrived. Must end in `call.reply()` or `call.fail()`, now or later."""
        call.fail(NOT_SERVED, f"{self.role} does not answer {type(call.message).__name__}")

    def on_publication(self, publisher: Address, topic: str, sequence: int, message: Any) -> None:
        """The next publication of a topic this actor subscribes to, with no gap or repeat since the last reset."""

    def on_subscription_reset(self, publisher: Address, topic: str) -> None:
        """The next publications do not continue the previous ones: a new publisher epoch, or an unfillable gap."""

    def on_subscriber_reset(self, subscriber: Address, topic: str) -> None:
        """A subscriber of a topic published here has missed more than its replay ring holds, and starts from nothing.

        This actor must publish again whatever the subscriber has to know; nothing else does.
        """

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        """An incarnation that this actor had a link to is gone or cut off."""

    def on_peer_down(self, sender: Address, down: PeerDown) -> None:
        """A believed sender reported an incarnation dead; its links and its entry in `ctx.members` are already gone."""

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        """The view of the mesh changed; `ctx.members` already reflects it."""

    def on_heartbeat(self, peer: Address, state: str, progress: str) -> None:
        """For hubs (registry and supervisors): a peer is alive and in this state.

        `progress` is its description of a long operation.
        """

    def is_outlived(self, by: Address, epoch: int) -> bool:
        """Whether this incarnation is over because a peer dials a later `epoch`. Called for the registry only."""
        return True

    def progress(self) -> str:
        """Progress of a long operation, in words for people; empty if there is nothing to report.

        Called with every heartbeat. Each change during a start restarts the supervisor's start timeout.
        """
        return ""

    def heartbeat_to(self, peer: Peer, renewed: Sequence[Renewed] = ()) -> Heartbeat:
        """The answer to a heartbeat from `peer`; called before `on_heartbeat`. `renewed`: a supervisor's own actors."""
        return Heartbeat()

    def waning(self) -> Sequence[Address]:
        """For the registry: whose leases are about to end. They are asked to renew them. Called at every heartbeat."""
        return ()

    async def drain(self) -> None:
        """Take no new work; return when all accepted work is done."""

    async def stop(self) -> None:
        """Release the actor's own resources. Called once, also after a `start` that failed half way."""

    def totals(self) -> dict[str, float]:
        """Totals that only rise, by name without `_total`: `/metrics` then has the rate of each, `NAME_per_second`, the
        mean over the last ten seconds. Called with every heartbeat, so it must be cheap.
        """
        return {}

    def stats(self) -> dict[str, float]:
        """Current gauges, keyed by name as in `/metrics` (`mesh_pages_free` or `mesh_pages{state="free"}`)."""
        return {}
