"""One timer for many deadlines: of links, of both sides of calls, of a core."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from mesh.context import Context
    from mesh.runtime.task_supervisor import TaskSupervisor

_NEVER: Final = float("inf")

SHORTEST_S: Final = 0.01
"""Between two rings of a timer: less than the shortest pause before anything is tried again."""


class DeadlineTimer:
    """Calls `due(now)` at the earliest deadline, as long as `arm` follows whatever may have brought one forward.

    Args:
        clock: its time and timers. Asked for when one is set; an actor has no context yet when it makes its timer.
        next_deadline: the earliest one, None while there is none.
        due: does what is to be done by now. Arms again for what is left.
        rest_s: it does not ring again within this: hundreds of deadlines a second are worked through some at a time.
    """

    __slots__ = ("_clock", "_due", "_handle", "_next_deadline", "_not_before", "_rest_s", "at")

    def __init__(
        self,
        clock: "Callable[[], Context | TaskSupervisor]",
        next_deadline: Callable[[], float | None],
        due: Callable[[float], object],
        *,
        rest_s: float = SHORTEST_S,
    ) -> None:
        self._clock = clock
        self._next_deadline = next_deadline
        self._due = due
        self._rest_s = rest_s
        self._not_before = -_NEVER
        self._handle: asyncio.TimerHandle | None = None
        # Kept here: what uvloop returns for a delay of 0 does not know its time.
        self.at = _NEVER

    def arm(self) -> None:
        """Something was handled. One that rings too early costs less than moving it each time, so it is not put off."""
        deadline = self._next_deadline()
        if deadline is None:
            return
        at = max(deadline, self._not_before)
        if self.at <= at:
            return
        if self._handle is not None:
            self._handle.cancel()
        clock = self._clock()
        self.at = at
        self._handle = clock.later(max(0.0, at - clock.now()), self._fire)

    def cancel(self) -> None:
        """Nothing is waited for any longer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle, self.at = None, _NEVER

    def _fire(self) -> None:
        # A timer may fire a clock tick early; a deadline is never missed by taking the armed time for now.
        now = max(self._clock().now(), self.at)
        self._not_before = now + self._rest_s
        # Before what is due is done, since that may arm for what it brings about.
        self._handle, self.at = None, _NEVER
        self._due(now)
