"""Events for a kv_agent's core, and its own commands; those of all cores: `mesh/runtime/effects.py`.

It is asked `MapPool`, `OpenGrants` and `CloseGrant`, and told `AnnouncePages`.
"""

from typing import TYPE_CHECKING, NamedTuple

from kvstore.transfer.session import CopyEnded, StartCopy
from mesh.address import Address
from mesh.runtime.effects import Asked, Effect, Told

if TYPE_CHECKING:
    from nodes.kv_agent.pools.facts import Pool


class SourceId(NamedTuple):
    """A pool, named by the agent that owns it and by its group."""

    agent: str
    group: str


# events


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
    Asked
    | Told
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


Own = MapForeign | UnmapForeign | StartPull | CancelPull
Command = Effect | Own
