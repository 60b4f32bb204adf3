"""Events about the memory of a kv_agent's groups, and own commands of `core.py`; others: `mesh/runtime/effects.py`.

It is asked `ReleaseMemory`, `ResumeMemory`, `ListMemory`, and asks holders `LetGo` and `TakeUp`, tagged with `Order`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mesh.address import Address
from mesh.runtime.effects import Answered, Asked, AskFailed, Effect


class DesiredState(NamedTuple):
    """What an operator wants released: whether the pool is, and how weights are (`keep`, `backup`, `reload`)."""

    is_kv: bool
    weights: str


class HolderSeen(NamedTuple):
    """A member that belongs to `group`. `saver`: it is a worker that can back its weights up.

    `has_loaded`: it is a worker that has loaded its model; one that waits for the pool of a released group has not.
    """

    address: Address
    role: str
    state: str
    group: str
    saver: bool = False
    has_loaded: bool = False


class PoolFacts(NamedTuple):
    """A group's pool at the agent's start. `desired`: how it is released, or None; `is_there` False: it is freed.

    `tp_size`: ranks of the group. Workers that are several end in order to let go.
    """

    group: str
    device: str
    num_bytes: int
    desired: DesiredState | None = None
    is_there: bool = True
    tp_size: int = 1


class Order(NamedTuple):
    """An ask of a holder to let go of a group's pool, or to take it up, as the group's order `number` says."""

    group: str
    number: int
    holder: Address


# events


class Mapped(NamedTuple):
    """An actor was told where the pool of a group is."""

    group: str
    holder: Address


class MembersSeen(NamedTuple):
    """All members that belong to a group, and the addresses of all members."""

    holders: Sequence[HolderSeen]
    members: frozenset[Address]


class HolderLost(NamedTuple):
    """An incarnation of an actor is gone."""

    address: Address


class CopiesEnded(NamedTuple):
    """No copy uses the pool of a group that is being released."""

    group: str


class PoolFreed(NamedTuple):
    """`FreePool` is done."""

    group: str


class PoolMade(NamedTuple):
    """`MakePool` is done."""

    group: str


class PoolRefused(NamedTuple):
    """`MakePool` failed."""

    group: str
    reason: str


class Tick(NamedTuple):
    """Time passed."""


MemoryEvent = (
    Asked
    | Answered
    | AskFailed
    | Mapped
    | MembersSeen
    | HolderLost
    | CopiesEnded
    | PoolFreed
    | PoolMade
    | PoolRefused
    | Tick
)


# commands


class Mark(NamedTuple):
    """Write the desired state into the header, or clear it, before anything else is done."""

    group: str
    desired: DesiredState | None


class StopCopies(NamedTuple):
    """Let nobody map the pool or copy from or to it; `CopiesEnded` follows when no copy is left."""

    group: str


class Offer(NamedTuple):
    """Let the pool be mapped and copied again; it has not changed."""

    group: str


class FreePool(NamedTuple):
    """Free the pages; `PoolFreed` follows. Nobody uses them."""

    group: str


class MakePool(NamedTuple):
    """Make the pool again, as another incarnation, and let it be mapped; `PoolMade` or `PoolRefused` follows."""

    group: str


Own = Mark | StopCopies | Offer | FreePool | MakePool
MemoryCommand = Effect | Own
