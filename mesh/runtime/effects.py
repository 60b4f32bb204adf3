"""What a pure core says that is to be done with the mesh, and what it is told of it: one way for all cores.

    outbox.tell      send a message; it may be lost
    outbox.ask       send one and be told the outcome: `Answered` or `AskFailed`, with the tag of the ask
    outbox.reply     answer a call
    outbox.refuse    answer a call with an error
    outbox.publish   on a topic
    outbox.add       a command of this core alone, which its owner performs

The parts of a core share one outbox; the core empties it at the end of each event (`return self.outbox.take()`). Its
owner performs its own commands, and hands all others to `perform` (`mesh/runtime/driver.py`). Timers are beside it: a
core's `Deadlines`, for which its owner has one `DeadlineTimer`. Pure.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from mesh.address import Address
from mesh.transport.base import Buffer, Channel

Own = TypeVar("Own")
"""The union of a core's own commands."""

_NOBODY = Address("", 0)


class Told(NamedTuple):
    """A message that wants no answer."""

    sender: Address
    message: Any


class Asked(NamedTuple):
    """A call; `call` is the owner's own token for it, given back in `Reply` or `Refuse`."""

    sender: Address
    message: Any
    call: Any


class Tell(NamedTuple):
    """Send; may be lost. Buffers are lent until they are sent."""

    actor_id: str
    message: Any
    channel: Channel = Channel.CONTROL
    buffers: Sequence[Buffer] = ()


class Ask(NamedTuple):
    """Send and bring back the outcome within `timeout_s`, with this tag."""

    actor_id: str
    message: Any
    timeout_s: float
    tag: Any


class Reply(NamedTuple):
    """Answer a call."""

    call: Any
    message: Any


class Refuse(NamedTuple):
    """Answer a call with an error; `known_epoch` as in `Call.fail`."""

    call: Any
    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    known_epoch: int = 0


class Publish(NamedTuple):
    """Publish on a topic."""

    topic: str
    message: Any


Effect = Tell | Ask | Reply | Refuse | Publish


class Answered(NamedTuple):
    """An ask was answered, by this incarnation."""

    tag: Any
    message: Any
    sender: Address = _NOBODY


class AskFailed(NamedTuple):
    """An ask was refused or brought no answer; the peer may have done what was asked nevertheless."""

    tag: Any
    code: str
    message: str = ""


Outcome = Answered | AskFailed


class Outbox(Generic[Own]):
    """The commands of the event being handled; shared by a core's parts, emptied by the core."""

    __slots__ = ("commands",)

    def __init__(self) -> None:
        self.commands: list[Effect | Own] = []

    def add(self, command: Effect | Own) -> None:
        self.commands.append(command)

    def tell(
        self, actor_id: str, message: Any, channel: Channel = Channel.CONTROL, buffers: Sequence[Buffer] = ()
    ) -> None:
        self.commands.append(Tell(actor_id, message, channel, buffers))

    def ask(self, actor_id: str, message: Any, timeout_s: float, tag: Any) -> None:
        self.commands.append(Ask(actor_id, message, timeout_s, tag))

    def reply(self, call: Any, message: Any) -> None:
        self.commands.append(Reply(call, message))

    def refuse(
        self, call: Any, code: str, message: str, *, retryable: bool = False, param: str | None = None,
        known_epoch: int = 0,
    ) -> None:  # fmt: skip
        self.commands.append(Refuse(call, code, message, retryable, param, known_epoch))

    def publish(self, topic: str, message: Any) -> None:
        self.commands.append(Publish(topic, message))

    def take(self) -> list[Effect | Own]:
        """All since the last time."""
        commands, self.commands = self.commands, []
        return commands
