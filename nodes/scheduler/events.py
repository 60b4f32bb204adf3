"""Events that the scheduler's core handles, and its own commands; those of all cores: `mesh/runtime/effects.py`.

`actor.py` turns what arrives into events, and performs commands in order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvstore.cache.allocator import Violation
from mesh.address import Address
from mesh.runtime import effects
from mesh.runtime.effects import Answered, Asked, AskFailed, Told
from nodes.protocol import Fence
from nodes.request import Stages
from nodes.trace_notes import Noting, unheard

Tag = tuple[str, str]
"""Names an ask: its kind, and what it is about."""


class PeerLost(NamedTuple):
    """An incarnation of an actor is gone or cannot be reached."""

    peer: Address


class WorkerDied(NamedTuple):
    """A supervisor says that an incarnation of a worker of this group is dead; its link has ended before that."""

    worker: Address


class ReadyPeer(NamedTuple):
    """A member that takes work; `numerics` is what a scheduler announces of its worker."""

    role: str
    epoch: int
    numerics: str = ""


class MembersChanged(NamedTuple):
    """Ready members, by actor id; `draining` ones take no more work, and may have ended since.

    `drained` are actors that stay down by their supervisor's word, with the epochs that they have or had.
    """

    ready: Mapping[str, ReadyPeer]
    draining: Collection[str] = ()
    drained: Mapping[str, int] = {}


class FollowerReset(NamedTuple):
    """A follower of a topic has missed more publications than are kept, and starts from nothing."""

    topic: str


class DrainAsked(NamedTuple):
    """Take nothing new, finish what is here."""


class MemoryWanted(NamedTuple):
    """The group's memory is to be released: everything that runs here fails back to its sender. The end follows."""


class Wake(NamedTuple):
    """Handle due deadlines, plan steps. Follows the other events of a loop turn, so that a burst makes one step."""


Event = (
    Told
    | Asked
    | Answered
    | AskFailed
    | PeerLost
    | WorkerDied
    | MembersChanged
    | FollowerReset
    | DrainAsked
    | MemoryWanted
    | Wake
)


class FenceWorker(NamedTuple):
    """Have a worker end whose answers cannot be believed, and log it as an error."""

    worker: str
    message: Fence


class Announce(NamedTuple):
    """Announce `state` (None: unchanged), whether there is a worker, its or the last one's `numerics` and `asks`."""

    state: str | None
    worker_ready: bool
    numerics: str = ""
    asks: Sequence[str] = ()


class Measured(NamedTuple):
    """An attempt has its first token: record where the time before it went."""

    stages: Stages


class PagesDamaged(NamedTuple):
    """The books disagreed about `num_pages` pages, which are quarantined now; `violations` are the last of them."""

    num_pages: int
    violations: list[Violation]


Own = FenceWorker | Announce | Measured | PagesDamaged
Command = effects.Effect | Own


StepNote = Callable[[int, int, int, int], None]
"""Kind, number of the step, and two numbers."""


class Outbox(effects.Outbox[Own]):
    """The core's, with what is noted of requests and steps.

    `note` and `step` are told at once what happens to requests and of steps that ended (`nodes/trace_notes.py`): they
    are read when an actor is looked into, and nothing depends on them.
    """

    __slots__ = ("note", "step")

    def __init__(self) -> None:
        super().__init__()
        self.note: Noting = unheard
        self.step: StepNote = unheard
