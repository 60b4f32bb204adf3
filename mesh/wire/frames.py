"""Bodies of the mesh's own frames, the third of the three owners of what is on the wire.

The header's `system` flag tells these from the bodies of the actors' own protocols. They are spoken by the ActorSystem
of every actor and by the registry; an actor sees only the asks that its class names in `system_asks`.
"""

from typing import Any

import msgspec

from mesh.address import Address, Endpoint
from mesh.membership.view import Member
from mesh.wire.codec import Codec
from mesh.wire.message import Message, Part


class Hello(Message, frozen=True):
    """First frame of every dialed link, on both channels: who dials and which protocol versions it speaks."""

    min_version: int
    max_version: int
    member: Member
    capabilities: dict[str, Any] = {}


class Welcome(Message, frozen=True):
    """Answer to `Hello` on the same channel: the version that both will use."""

    version: int
    member: Member
    capabilities: dict[str, Any] = {}


class Heartbeat(Message, frozen=True):
    """A sign of life. From a registry: its membership version, and whether it knows the receiver."""

    state: str = ""
    registry_epoch: int = 0
    version: int = 0
    known: bool = True


class Renew(Message, frozen=True):
    """The heartbeat that an actor sends to the registry; renews its lease. Answered by `Heartbeat`.

    `progress` says how far it is with what takes long, in words for people (`loading 12/28 layers, 3.1 of 7.6 GB`); who
    starts and says something new is not stuck.
    """

    state: str = ""
    progress: str = ""


class ErrorBody(Message, frozen=True):
    """Why an ask or a stream failed, or why a frame was refused.

    `known_epoch`: with `superseded` and `stale_epoch`, the epoch that the next incarnation of the sender has to be
    above: that of a later one known here, or its own where a registry that has just begun says so. With `wrong_epoch`
    the epoch of this actor, where the frame was for another. 0 with all others.
    """

    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    known_epoch: int = 0


class Credit(Message, frozen=True):
    """The receiver of a stream allows its sender `limit` items in all, counted from the stream's start."""

    limit: int


class Cancel(Message, frozen=True):
    """The asker no longer wants the answer to the ask or stream that the correlation id names."""

    reason: str = ""


class End(Message, frozen=True):
    """A stream has delivered all its items."""


class Bye(Message, frozen=True):
    """The sender closes its side in good order; nothing more comes from this incarnation."""

    reason: str = ""


class Join(Message, frozen=True):
    """Ask the registry to take a member in, or to update what it says. Idempotent. Answer: `Joined`.

    `known_epoch` and `known_version` are of the asker's view, so that the registry sends a snapshot only if needed.
    `known_members` is the asker's whole view, given to a new registry epoch: whoever is named there keeps a lease, so
    that a restarted registry does not seem to say that everybody has left. `mesh` is the name of the mesh that the
    member is meant for: a registry of another refuses it with `wrong_mesh`. Empty: it goes wherever it was sent. `spec`
    is what its host takes the mesh to be; what differs from the registry's is refused with `wrong_spec`.
    """

    member: Member
    known_epoch: int = 0
    known_version: int = 0
    known_members: list[Member] = []
    mesh: str = ""
    spec: dict[str, str] = {}


class Joined(Message, frozen=True):
    """The member holds a lease of `lease_s` from now, renewed by `Renew`. `members` is the snapshot, None if known."""

    registry_epoch: int
    version: int
    lease_s: float
    members: list[Member] | None = None


class Leave(Message, frozen=True):
    """Ask the registry to end a membership: by the member itself, or by the supervisor that saw it die. Idempotent."""

    actor_id: str
    epoch: int
    reason: str = ""


class Left(Message, frozen=True):
    """Answer to `Leave`."""


STOPPED = "stopped"
"""Reason of whoever leaves by itself: it says bye to its peers after all it has sent, so they can wait for that."""


class Departed(Part, frozen=True):
    """An incarnation that is no longer a member."""

    actor_id: str
    epoch: int
    reason: str = ""

    @property
    def address(self) -> Address:
        """The incarnation."""
        return Address(self.actor_id, self.epoch)


class MembersChanged(Message, frozen=True):
    """The registry tells every member of change number `version`. Whoever misses one joins again for a snapshot.

    It may tell several at once: all that came after version `follows`; 0: the one before `version`.
    """

    registry_epoch: int
    version: int
    upserted: list[Member] = []
    left: list[Departed] = []
    follows: int = 0


class PeerDown(Message, frozen=True):
    """A supervisor tells that an incarnation is dead (reaped), so that whoever waits for it stops at once.

    Believed of the registry, of the receiver's own supervisor, and of members with the role `supervisor` of actors of
    their host; on a host whose supervisor has a secret only if they are proved. Other hosts' supervisors are told, and
    tell their own actors in turn, with `said_by`, the supervisor that they have it from: of the supervisor of the
    receiver's host that is believed of actors of the host of `said_by`.
    """

    actor_id: str
    epoch: int
    reason: str = ""
    said_by: str = ""


class Subscribe(Message, frozen=True):
    """Follow a topic from publication `next_sequence` (1: the first) of `publisher_epoch` on. Answer: `Subscribed`.

    Renewed by subscribers when nothing came for a while; a publisher forgets a subscriber whose link is down.
    """

    topic: str
    publisher_epoch: int
    next_sequence: int = 1


class Subscribed(Message, frozen=True):
    """What follows starts at publication `next_sequence`; `reset` if that is not what was asked for."""

    topic: str
    next_sequence: int
    reset: bool = False


class Unsubscribe(Message, frozen=True):
    """Follow a topic no longer. Told, not asked."""

    topic: str


class Publication(Message, frozen=True):
    """Publication number `sequence` (from 1, per topic and publisher epoch); `payload` is the actor's own message."""

    topic: str
    sequence: int
    payload: msgspec.Raw


class Ping(Message, frozen=True):
    """Ask whether anybody is there. Answer: `Pong`."""


class Pong(Message, frozen=True):
    """Answer to `Ping`."""


class Histogram(Part, frozen=True):
    """`counts[i]` observations were at most `bounds[i]`, the last count is of those above all; `total` is their sum."""

    bounds: list[float]
    counts: list[int]
    total: float


class StatsRequest(Message, frozen=True):
    """Ask an actor for its metrics. Answer: `StatsReply`."""


class StatsReply(Message, frozen=True):
    """Metrics of one actor; keys are Prometheus series such as `mesh_frames_refused_total{code="bad_header"}`."""

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, Histogram] = {}


class DescribeRequest(Message, frozen=True):
    """Ask an actor what it is. Answer: `Describe`."""


class Describe(Message, frozen=True):
    """What `meshctl ps` shows of an actor."""

    actor_id: str
    role: str
    pid: int
    epoch: int
    endpoint: Endpoint
    state: str
    host: str = ""
    uptime_s: float = 0.0
    attributes: dict[str, Any] = {}


class Draining(Message, frozen=True):
    """Body of the verb `draining`, told to all peers: the sender takes no new work."""


class ListMembers(Message, frozen=True):
    """Ask the registry who is in the mesh, without joining it. Answer: `Members`."""


class Members(Message, frozen=True):
    """Answer to `ListMembers`. `mesh` is the name of the registry's mesh, `release` of the software that it runs.

    `spec` is what all hosts of the mesh have in common, empty on a mesh of one; `settings` is what a host that has no
    topology file takes over.
    """

    registry_epoch: int
    version: int
    members: list[Member]
    mesh: str = ""
    release: str = ""
    spec: dict[str, str] = {}
    settings: dict[str, Any] = {}


class Drain(Message, frozen=True):
    """Ask an actor to take no new work and finish what it has. Answer: `Drained` when that is done."""


class Drained(Message, frozen=True):
    """Answer to `Drain`: the actor is empty and still there."""


class Shutdown(Message, frozen=True):
    """Ask an actor to end. Answer: `ShuttingDown`, then `bye` to all its peers."""

    reason: str = ""


class ShuttingDown(Message, frozen=True):
    """Answer to `Shutdown`."""


SystemMessage = (
    Hello
    | Welcome
    | Heartbeat
    | Renew
    | ErrorBody
    | Credit
    | Cancel
    | End
    | Bye
    | Join
    | Joined
    | Leave
    | Left
    | MembersChanged
    | PeerDown
    | Subscribe
    | Subscribed
    | Unsubscribe
    | Publication
    | Ping
    | Pong
    | StatsRequest
    | StatsReply
    | DescribeRequest
    | Describe
    | Draining
    | ListMembers
    | Members
    | Drain
    | Drained
    | Shutdown
    | ShuttingDown
)
SYSTEM_CODEC = Codec(SystemMessage)
