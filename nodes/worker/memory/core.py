"""Whether a worker has its memory (pool mapped, weights loaded); decides when to release it and when to take it back.

    held --LetGo--> stopping --idle--> releasing --> released --TakeUp--> resuming --> held

In `stopping` the worker begins no step and waits for the running one. The scheduler that has adopted it finds it
silent, which is right: that scheduler has given everything back, or is dead. The agent numbers its orders, and the last
one counts, even if it arrives while an earlier one is being carried out; that one is finished first. An order that is
already fulfilled is answered at once.

Pure; performed by `actions.py`.
"""

import enum
from typing import Any, Final, NamedTuple, assert_never

from kvstore.protocol import PoolHandle
from nodes.protocol.memory import LetGo, TakeUp

SUPERSEDED: Final = "superseded"


class Stage(enum.Enum):
    """The state of a worker's memory; the names are those of the diagram above."""

    HELD = "held"
    STOPPING = "stopping"
    RELEASING = "releasing"
    RELEASED = "released"
    RESUMING = "resuming"


# events


class Ordered(NamedTuple):
    """The agent, of this epoch, gives an order; `call` is the actor's token for the answer."""

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
    """Begin no more steps; report `StepsEnded`, now or later."""


class Release(NamedTuple):
    """Release the pool, and do with the weights as `weights` says; report `HasReleased`."""

    weights: str


class Resume(NamedTuple):
    """Map the pool, restore the weights; report `HasResumed`."""

    pool: PoolHandle


class GoOn(NamedTuple):
    """Begin steps again."""


class Confirm(NamedTuple):
    """Answer this call: its order is done."""

    call: Any
    order: LetGo | TakeUp


class Refuse(NamedTuple):
    """Refuse this call: a later order has replaced its order."""

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
        return self.stage is Stage.HELD

    def handle(self, event: Event) -> list[Command]:
        """Take one event; returns what to do, in order."""
        match event:
            case Ordered():
                return self._on_order(event)
            case StepsEnded():
                return self._on_steps_ended()
            case HasReleased():
                assert self.stage is Stage.RELEASING, "memory was released without an order"
                self.stage = Stage.RELEASED
            case HasResumed():
                assert self.stage is Stage.RESUMING, "memory was taken back without an order"
                self.stage = Stage.HELD
                return [GoOn(), *self._go_on()]
            case _:
                assert_never(event)
        return self._go_on()

    def _on_order(self, event: Ordered) -> list[Command]:
        number = (event.epoch, event.order.number)
        if number < self._number:
            return [Refuse(event.call, f"order {number} has been replaced, the last one is {self._number}")]
        commands: list[Command] = []
        if number > self._number:
            message = f"order {number} came before this one was carried out"
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
        # The order was reversed before anything was released.
        self.stage = Stage.HELD
        return [GoOn(), *self._go_on()]

    def _go_on(self) -> list[Command]:
        order = self._order
        assert order is not None, "an event before the first order"
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
