"""Whether a worker has its memory: pool mapped, weights there. Decides when to let go of it, and when to take it up.

    held --LetGo--> stopping --idle--> releasing --> released --TakeUp--> resuming --> held

`stopping` begins no step and waits for the one that runs; whoever has it adopted finds it silent, which is right: that
scheduler has given everything back, or is dead. Orders are numbered by the agent that gives them; the last one counts,
also if it comes in the middle of what an earlier one began, which is then done to its end first. An order that is done
already is answered at once.

Pure; performed by `actions.py`.
"""

import enum
from typing import Any, Final, NamedTuple, assert_never

from kvstore.protocol import PoolHandle
from nodes.protocol.memory import LetGo, TakeUp

SUPERSEDED: Final = "superseded"


class Stage(enum.Enum):
    """Where the memory of a worker is on its way round; the names are those of the drawing above."""

    HELD = "held"
    STOPPING = "stopping"
    RELEASING = "releasing"
    RELEASED = "released"
    RESUMING = "resuming"


# events


class Ordered(NamedTuple):
    """The agent, of this epoch, asks; `call` is the actor's token for the answer."""

    epoch: int
    order: LetGo | TakeUp
    call: Any


class StepsEnded(NamedTuple):
    """No step runs."""


class HasReleased(NamedTuple):
    """`Release` is done."""


class HasResumed(NamedTuple):
    """`Resume` is done."""


Event = Ordered | StepsEnded | HasReleased | HasResumed


# commands


class StopSteps(NamedTuple):
    """Begin no more steps; say `StepsEnded`, now or later."""


class Release(NamedTuple):
    """Give up the pool, and weights as said; say `HasReleased`."""

    weights: str


class Resume(NamedTuple):
    """Map the pool, have the weights again; say `HasResumed`."""

    pool: PoolHandle


class GoOn(NamedTuple):
    """Begin steps again."""


class Confirm(NamedTuple):
    """The order of this call is done."""

    call: Any
    order: LetGo | TakeUp


class Refuse(NamedTuple):
    """The order of this call will not be done: another came later."""

    call: Any
    message: str


Command = StopSteps | Release | Resume | GoOn | Confirm | Refuse


class MemoryOccupation:
    """The memory of one worker; held at first."""

    def __init__(self) -> None:
        self.stage = Stage.HELD
        self._order: LetGo | TakeUp | None = None
        self._number = (0, 0)
        self._calls: list[Any] = []

    @property
    def is_held(self) -> bool:
        """Steps may run."""
        return self.stage is Stage.HELD

    def handle(self, event: Event) -> list[Command]:
        """Take one event; returns what to do, in order."""
        match event:
            case Ordered():
                return self._on_order(event)
            case StepsEnded():
                return self._on_steps_ended()
            case HasReleased():
                assert self.stage is Stage.RELEASING, "it was asked for"
                self.stage = Stage.RELEASED
            case HasResumed():
                assert self.stage is Stage.RESUMING, "it was asked for"
                self.stage = Stage.HELD
                return [GoOn(), *self._go_on()]
            case _:
                assert_never(event)
        return self._go_on()

    def _on_order(self, event: Ordered) -> list[Command]:
        number = (event.epoch, event.order.number)
        if number < self._number:
            return [Refuse(event.call, f"order {number} is over, the last one is {self._number}")]
        commands: list[Command] = []
        if number > self._number:
            message = f"order {number} came before it was done"
            commands += [Refuse(call, message) for call in self._calls]
            self._calls.clear()
            self._number, self._order = number, event.order
        self._calls.append(event.call)
        return commands + self._go_on()

    def _on_steps_ended(self) -> list[Command]:
        if self.stage is not Stage.STOPPING:
            return []
        if isinstance(self._order, LetGo):
            self.stage = Stage.RELEASING
            return [Release(self._order.weights)]
        # It was called back before anything was given up.
        self.stage = Stage.HELD
        return [GoOn(), *self._go_on()]

    def _go_on(self) -> list[Command]:
        order = self._order
        assert order is not None, "whatever happens was ordered"
        match order:
            case LetGo():
                if self.stage is Stage.HELD:
                    self.stage = Stage.STOPPING
                    return [StopSteps()]
                return self._confirm(Stage.RELEASED, order)
            case TakeUp(pool=pool):
                if self.stage is Stage.RELEASED:
                    self.stage = Stage.RESUMING
                    return [Resume(pool)]
                return self._confirm(Stage.HELD, order)
            case _:
                assert_never(order)

    def _confirm(self, wanted: Stage, order: LetGo | TakeUp) -> list[Command]:
        if self.stage is not wanted:
            return []
        confirmed: list[Command] = [Confirm(call, order) for call in self._calls]
        self._calls.clear()
        return confirmed
