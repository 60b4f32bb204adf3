"""Events that the scheduler's core handles, and commands that it returns.

`actor.py` turns what arrives into events, performs commands in order, and turns the outcome of every `Ask` into
`Answered` or `AskFailed` with the command's tag.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.cache.allocator import Violation
from mesh.address import Address
from mesh.transport.base import Buffer, Channel
from nodes.protocol import Fence, StepPlan
from nodes.request import Stages
from nodes.trace_notes import Noting, unheard

Tag = tuple[str, str]
"""Names an ask: its kind, and what it is about."""


class Told(NamedTuple):
    """A message that wants no answer."""

    sender: Address
    message: Any


class Asked(NamedTuple):
    """A call; `call` is the actor's own token for it, given back in `Reply` or `Refuse`."""

    sender: Address
    message: Any
    call: Any


class Answered(NamedTuple):
    """An ask was answered."""

    tag: Tag
    message: Any


class AskFailed(NamedTuple):
    """An ask was refused or brought no answer; the peer may have done what was asked nevertheless."""

    tag: Tag
    code: str


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


class Tell(NamedTuple):
    """Send; may be lost."""

    actor_id: str
    message: Any
    channel: Channel = Channel.CONTROL


class Ask(NamedTuple):
    """Send and bring back the outcome within `timeout_s`."""

    actor_id: str
    message: Any
    timeout_s: float
    tag: Tag


class SendStep(NamedTuple):
    """Tell the worker one step. Buffers: rows, token ids and page ids, int32, lent until sent."""

    worker: str
    plan: StepPlan
    buffers: Sequence[Buffer]


class FenceWorker(NamedTuple):
    """Have a worker end whose answers cannot be believed, and log it as an error."""

    worker: str
    message: Fence


class Reply(NamedTuple):
    """Answer a call."""

    call: Any
    message: Any


class Refuse(NamedTuple):
    """Answer a call with an error."""

    call: Any
    code: str
    message: str
    retryable: bool = False
    param: str | None = None


class Publish(NamedTuple):
    """Publish on a topic."""

    topic: str
    message: Any


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


Command = Tell | Ask | SendStep | FenceWorker | Reply | Refuse | Publish | Announce | Measured | PagesDamaged


StepNote = Callable[[int, int, int, int], None]
"""Kind, number of the step, and two numbers."""


class Outbox:
    """The commands of the event being handled; shared by the core's parts, emptied by the core.

    `note` and `step` are told at once what happens to requests and of steps that ended (`nodes/trace_notes.py`): they
    are read when an actor is looked into, and nothing depends on them.
    """

    __slots__ = ("commands", "note", "step")

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.note: Noting = unheard
        self.step: StepNote = unheard

    def add(self, command: Command) -> None:
        self.commands.append(command)

    def tell(self, actor_id: str, message: Any, channel: Channel = Channel.CONTROL) -> None:
        self.commands.append(Tell(actor_id, message, channel))

    def take(self) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands
