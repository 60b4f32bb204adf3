"""Whether a worker has its memory (pool mapped, weights loaded); decides when to release it and when to take it back.

    held --LetGo--> stopping --idle--> releasing --> released --TakeUp--> resuming --> held

In `stopping` the worker begins no step and waits for the running one. The scheduler that has adopted it finds it
silent, which is right: that scheduler has given everything back, or is dead. The agent numbers its orders, and the last
one counts, even if it arrives while an earlier one is being carried out; that one is finished first. An order that is
already fulfilled is answered at once.

Pure; performed by `actions.py`. It is asked `LetGo` and `TakeUp`.
"""

import enum
from typing import Any, Final, NamedTuple, assert_never

from kvstore.protocol import PoolHandle
from mesh.runtime.effects import Asked, Effect, Outbox
from nodes.protocol.memory import HasLetGo, HasTakenUp, LetGo, TakeUp

SUPERSEDED: Final = "superseded"


class Stage(enum.Enum):
    """The state of a worker's memory; the names are those of the diagram above."""

    HELD = "held"
    STOPPING = "stopping"
    RELEASING = "releasing"
    RELEASED = "released"
    RESUMING = "resuming"


# events


class StepsEnded(NamedTuple):
    """No step runs."""


class HasReleased(NamedTuple):
    """`Release` is done."""


class HasResumed(NamedTuple):
    """`Resume` is done."""


Event = Asked | StepsEnded | HasReleased | HasResumed


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


Own = StopSteps | Release | Resume | GoOn
Command = Effect | Own


class MemoryOccupation:
    """The memory of one worker; held at first."""

    def __init__(self) -> None:
        self.stage = Stage.HELD
        self._order: LetGo | TakeUp | None = None
        self._number = (0, 0)
        self._calls: list[Any] = []
        self._outbox = Outbox[Own]()

    @property
    def is_held(self) -> bool:
        return self.stage is Stage.HELD

    def handle(self, event: Event) -> list[Command]:
        """Take one event; returns what to do, in order."""
        match event:
            case Asked():
                self._on_order(event)
            case StepsEnded():
                self._on_steps_ended()
            case HasReleased():
                assert self.stage is Stage.RELEASING, "memory was released without an order"
                self.stage = Stage.RELEASED
                self._go_on()
            case HasResumed():
                assert self.stage is Stage.RESUMING, "memory was taken back without an order"
                self._hold()
            case _:
                assert_never(event)
        return self._outbox.take()

    def _on_order(self, asked: Asked) -> None:
        order: LetGo | TakeUp = asked.message
        number = (asked.sender.epoch, order.number)
        if number < self._number:
            self._refuse(asked.call, f"order {number} has been replaced, the last one is {self._number}")
            return
        if number > self._number:
            for call in self._calls:
                self._refuse(call, f"order {number} came before this one was carried out")
            self._calls.clear()
            self._number, self._order = number, order
        self._calls.append(asked.call)
        self._go_on()

    def _on_steps_ended(self) -> None:
        if self.stage is not Stage.STOPPING:
            return
        if isinstance(self._order, LetGo):
            self.stage = Stage.RELEASING
            self._outbox.add(Release(self._order.weights))
        else:
            # The order was reversed before anything was released.
            self._hold()

    def _hold(self) -> None:
        self.stage = Stage.HELD
        self._outbox.add(GoOn())
        self._go_on()

    def _go_on(self) -> None:
        order = self._order
        assert order is not None, "an event before the first order"
        if isinstance(order, LetGo):
            if self.stage is Stage.HELD:
                self.stage = Stage.STOPPING
                self._outbox.add(StopSteps())
            elif self.stage is Stage.RELEASED:
                self._confirm(HasLetGo(group=order.group, number=order.number))
        elif self.stage is Stage.RELEASED:
            self.stage = Stage.RESUMING
            self._outbox.add(Resume(order.pool))
        elif self.stage is Stage.HELD:
            self._confirm(HasTakenUp(group=order.group, number=order.number))

    def _confirm(self, done: HasLetGo | HasTakenUp) -> None:
        for call in self._calls:
            self._outbox.reply(call, done)
        self._calls.clear()

    def _refuse(self, call: Any, why: str) -> None:
        self._outbox.refuse(call, SUPERSEDED, why, retryable=True)
