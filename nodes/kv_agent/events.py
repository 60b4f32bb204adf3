"""Events for a kv_agent's core and commands from it: the two alphabets between `core.py` and `actor.py`."""

from typing import TYPE_CHECKING, NamedTuple

from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    GrantsOpened,
    MapPool,
    OpenGrants,
    PagesPulled,
    PagesReady,
    PoolHandle,
    TransferFailed,
)
from kvstore.transfer.session import CopyEnded, StartCopy
from mesh.address import Address

if TYPE_CHECKING:
    from nodes.kv_agent.pools.facts import Pool


class SourceId(NamedTuple):
    """A pool, named by the agent that owns it and by its group."""

    agent: str
    group: str


# events


class MapAsked(NamedTuple):
    """An ask for a pool; `call` is the actor's number for the call to answer."""

    call: int
    sender: Address
    message: MapPool


class OpenAsked(NamedTuple):
    """An ask for grants."""

    call: int
    sender: Address
    message: OpenGrants


class CloseAsked(NamedTuple):
    """An ask to revoke a grant."""

    call: int
    sender: Address
    message: CloseGrant


class PagesAnnounced(NamedTuple):
    """A prefill scheduler announced that pages are finished."""

    sender: Address
    message: PagesReady


class SourceMapped(NamedTuple):
    """A foreign pool can be read now."""

    source: SourceId
    incarnation: int
    layout_digest: bytes


class SourceRefused(NamedTuple):
    """A foreign pool cannot be read."""

    source: SourceId
    code: str
    message: str


class CopyDone(NamedTuple):
    """A copy that `StartPull` began is over; `transport` moved its bytes, if one began to."""

    grant_id: str
    ended: CopyEnded
    num_bytes: int
    transport: str = ""


class PeerGone(NamedTuple):
    """An incarnation of an actor is lost."""

    peer: Address
    reason: str


class Draining(NamedTuple):
    """No new grants from now on."""


class GroupReleased(NamedTuple):
    """Nobody may use the pool of a group: no copy begins, running ones end. `code` and `message` tell callers why."""

    group: str
    code: str
    message: str


class GroupHeld(NamedTuple):
    """The pool of a group is available and may be mapped."""

    pool: "Pool"


class StoreHeld(NamedTuple):
    """A store of this agent can be read, by the name `source`, for pools of this layout."""

    source: str
    incarnation: int
    layout_digest: bytes


class SourceReleased(NamedTuple):
    """The owner of a foreign pool wants it unmapped."""

    source: SourceId


class Tick(NamedTuple):
    """Time passed."""


Event = (
    MapAsked
    | OpenAsked
    | CloseAsked
    | PagesAnnounced
    | SourceMapped
    | SourceRefused
    | CopyDone
    | PeerGone
    | Draining
    | GroupReleased
    | GroupHeld
    | StoreHeld
    | SourceReleased
    | Tick
)


# commands


class Reply(NamedTuple):
    """Answer a call."""

    call: int
    message: PoolHandle | GrantsOpened | GrantClosed


class Refuse(NamedTuple):
    """Answer a call with an error."""

    call: int
    code: str
    message: str
    retryable: bool = False


class Tell(NamedTuple):
    """Tell an actor."""

    receiver: str
    message: PagesPulled | TransferFailed


class MapForeign(NamedTuple):
    """Make a foreign pool readable; answer `SourceMapped` or `SourceRefused`."""

    source: SourceId


class UnmapForeign(NamedTuple):
    """Give a foreign pool up; copies from it end."""

    source: SourceId


class StartPull(NamedTuple):
    """Copy pages into the pool of `group` from this incarnation of `source`; always answer `CopyDone`."""

    grant_id: str
    group: str
    source: SourceId
    incarnation: int
    copy: StartCopy


class CancelPull(NamedTuple):
    """End a copy early; its `CopyDone` still comes."""

    grant_id: str
    copy_id: int


Command = Reply | Refuse | Tell | MapForeign | UnmapForeign | StartPull | CancelPull
