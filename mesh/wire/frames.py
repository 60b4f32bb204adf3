"""Bodies of the mesh's own frames, one of the four places that define what is on the wire (`mesh/wire/message.py`).

The header's `system` flag distinguishes these from the bodies of the actors' own protocols. They are spoken by the
ActorSystem of every actor and by the registry; an actor sees only the asks that its class lists in `system_asks`.
"""

from typing import Annotated, Any

import msgspec

from mesh.address import Address
from mesh.membership.view import Member
from mesh.wire.codec import Codec
from mesh.wire.message import Message, Part


class Hello(Message, frozen=True):
    """First frame on both channels of every dialed link: who is dialing and which protocol versions it speaks."""

    min_version: int
    max_version: int
    member: Member


class Welcome(Message, frozen=True):
    """Answer to `Hello` on the same channel: the version that both sides will use."""

    version: int
    member: Member


class Heartbeat(Message, frozen=True):
    """A sign of life. From a registry: its membership version, and whether it knows the receiver.

    `unknown` are those of `Renew.renewed` that hold no lease. `renew`: the receiver's lease is about to end, and it is
    to send a `Renew` now, or a `Join` if it has not joined here. A supervisor passes the version on to an actor that is
    behind it or holds no lease, and to no other.
    """

    registry_epoch: int = 0
    version: int = 0
    known: bool = True
    unknown: list[str] = []
    renew: bool = False


class Renewed(Part, frozen=True):
    """An actor whose lease its supervisor renews, `age_ms` after it heard from it; the lease counts from then."""

    actor_id: str
    epoch: int
    age_ms: Annotated[int, msgspec.Meta(ge=0)]


class Renew(Message, frozen=True):
    """The heartbeat that an actor sends to its hubs; at the registry it renews the lease. Answered by `Heartbeat`.

    `progress` describes a long operation in words for people (`loading 12/28 layers, 3.1 of 7.6 GB`); a starting actor
    whose `progress` changes is not considered stuck.

    An actor on the registry's host leaves its lease to its supervisor: it sends `answer` false, the version of the
    registry that it knows (0: it has not joined), and no heartbeat to the registry. The supervisor's own `Renew` at
    the registry names these actors in `renewed`. `next_in`: heartbeat intervals until the sender's next one, 0 if none
    is planned; only one of 1 is watched for.
    """

    state: str = ""
    progress: str = ""
    answer: bool = True
    registry_epoch: int = 0
    version: int = 0
    renewed: list[Renewed] = []
    next_in: int = 1


class ErrorBody(Message, frozen=True):
    """Why an ask failed, or why a frame was refused.

    `known_epoch`: with `superseded` and `stale_epoch`, the epoch that the next incarnation of the refused actor must
    exceed: that of a later incarnation known here or, from a registry that has just started, the registry's own if
    that is higher. With `wrong_epoch`, the epoch of the incarnation that received a frame meant for another one. 0 with
    all other codes.
    """

    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    known_epoch: int = 0


class Cancel(Message, frozen=True):
    """The asker no longer wants the answer to the ask that the correlation id names."""

    reason: str = ""


class Bye(Message, frozen=True):
    """The sender closes its side in an orderly way; nothing more comes from this incarnation."""


class Join(Message, frozen=True):
    """Ask the registry to admit a member, or to update its entry. Idempotent. Answer: `Joined`.

    `known_epoch` and `known_version` are those of the asker's view, so that the registry sends a snapshot only if
    needed. `known_members` is the asker's whole view when the registry epoch is new to it, and the members of its own
    host after its lease has lapsed: they keep a lease, so that a restarted registry does not appear to say that
    everybody has left. `mesh` is the name of the mesh that the member is meant for: the registry of another mesh
    refuses it with `wrong_mesh`. Empty: any mesh. `spec` is what the member's host takes the mesh to be; if it differs
    from the registry's, the join is refused with `wrong_spec`.
    """

    member: Member
    known_epoch: int = 0
    known_version: int = 0
    known_members: list[Member] = []
    mesh: str = ""
    spec: dict[str, str] = {}


class Joined(Message, frozen=True):
    """The member holds a lease from now, renewed by `Renew`. `members`: a snapshot, None if not needed."""

    registry_epoch: int
    version: int
    members: list[Member] | None = None


class Leave(Message, frozen=True):
    """Ask the registry to end a membership; sent by the member, or by the supervisor that saw it die. Idempotent."""

    actor_id: str
    epoch: int
    reason: str = ""


class Left(Message, frozen=True):
    """Answer to `Leave`."""


STOPPED = "stopped"
"""Reason given by an actor that leaves by itself: its bye follows everything it has sent, so peers can wait for it."""


class Departed(Part, frozen=True):
    """An incarnation that is no longer a member."""

    actor_id: str
    epoch: int
    reason: str = ""

    @property
    def address(self) -> Address:
        return Address(self.actor_id, self.epoch)


class MembersChanged(Message, frozen=True):
    """The registry tells every member of change number `version`. A member that misses one joins again for a snapshot.

    One message may carry several changes: all those after version `follows`; 0 stands for `version` - 1.
    """

    registry_epoch: int
    version: int
    upserted: list[Member] = []
    left: list[Departed] = []
    follows: int = 0


class PeerDown(Message, frozen=True):
    """A supervisor reports that an incarnation is dead (reaped), so that its peers stop waiting for it at once.

    Believed from the registry, from the receiver's own supervisor, and from members with the role `supervisor` about
    actors of their own host; on a host whose supervisor has a secret, only if the sender is proved. Supervisors of
    other hosts are told too, and tell their own actors with `said_by` set to the supervisor that reported the death: a
    receiver believes its own host's supervisor about actors of the host of `said_by`.
    """

    actor_id: str
    epoch: int
    reason: str = ""
    said_by: str = ""


class Subscribe(Message, frozen=True):
    """Follow a topic from publication `next_sequence` (1: the first) of `publisher_epoch` on. Answer: `Subscribed`.

    Subscribers repeat it when nothing has come for a while; a publisher forgets a subscriber whose link is down.
    """

    topic: str
    publisher_epoch: int
    next_sequence: int = 1


class Subscribed(Message, frozen=True):
    """The publications that follow start at `next_sequence`; `reset` if that is not what was asked for."""

    topic: str
    next_sequence: int
    reset: bool = False


class Unsubscribe(Message, frozen=True):
    """Stop following a topic. Told, not asked."""

    topic: str


class Publication(Message, frozen=True):
    """Publication number `sequence` (from 1, per topic and publisher epoch); `payload` is the publisher's message."""

    topic: str
    sequence: int
    payload: msgspec.Raw


class Ping(Message, frozen=True):
    """Ask whether a peer is still there. Answer: `Pong`."""


class Pong(Message, frozen=True):
    """Answer to `Ping`."""


class Histogram(Part, frozen=True):
    """`counts[i]` observations were at most `bounds[i]` and above the bound before; the last count is above all bounds.

    `total` is the sum of all observations.
    """

    bounds: list[float]
    counts: list[int]
    total: float


class History(Part, frozen=True):
    """Samples of a few figures, one every 5 s, of the last ten minutes at most. `number` counts those of this
    incarnation; the last sample here has it. `ages_s` says how long ago each was taken, oldest first, and `columns` its
    figures by series; -1 where there was none. Of a histogram it is the mean of what was observed since the sample
    before.
    """

    number: int
    ages_s: list[float] = []
    columns: dict[str, list[float]] = {}


class StatsRequest(Message, frozen=True):
    """Ask an actor for its metrics, and for the samples of its history later than the number `history_after` if that is
    set. Answer: `StatsReply`.
    """

    history_after: int | None = None


class StatsReply(Message, frozen=True):
    """Metrics of one actor; keys are Prometheus series such as `mesh_frames_refused_total{code="bad_header"}`."""

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, Histogram] = {}
    history: History | None = None


class Draining(Message, frozen=True):
    """Body of the verb `draining`, sent to all peers: the sender takes no new work."""


class ListMembers(Message, frozen=True):
    """Ask the registry who is in the mesh, without joining it. Answer: `Members`."""


class Members(Message, frozen=True):
    """Answer to `ListMembers`. `mesh` is the name of the registry's mesh, `release` the software release it runs.

    `spec` is what all hosts of the mesh have in common, empty on a mesh of one host; `settings` are those that a host
    without a topology file adopts.
    """

    members: list[Member]
    mesh: str = ""
    release: str = ""
    spec: dict[str, str] = {}
    settings: dict[str, Any] = {}


SystemMessage = (
    Hello
    | Welcome
    | Heartbeat
    | Renew
    | ErrorBody
    | Cancel
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
    | Draining
    | ListMembers
    | Members
)
SYSTEM_CODEC = Codec(SystemMessage)
