"""One timer for many deadlines: those of links, of both sides of calls, or of a core."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

_NEVER: Final = float("inf")

SHORTEST_S: Final = 0.01
"""Minimum time between two firings of a timer: less than the shortest pause before anything is retried."""


class Clock(Protocol):
    """The source of time and timers: an actor's `Context` or its `TaskSupervisor`."""

    def now(self) -> float:
        """Seconds on the event loop's clock."""
        ...

    def later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        """Call back once after `delay_s` seconds, unless the handle is cancelled before."""
        ...


class DeadlineTimer:
    """Calls `due(now)` at the earliest deadline, provided that `arm` is called whenever that may have become earlier.

    `clock` is called only when needed, since an actor has no context yet when it makes its timer. Nothing fires again
    within `rest_s`, so that hundreds of deadlines a second are batched.
    """

    __slots__ = ("_clock", "_due", "_handle", "_next_deadline", "_not_before", "_rest_s", "at")

    def __init__(
        self,
        clock: Callable[[], Clock],
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
        # Kept here because the handle that uvloop returns for a delay of 0 does not know its time.
        self.at = _NEVER

    def arm(self) -> None:
        """Arm for the earliest deadline. An armed timer is never put off: firing early costs less than moving it."""
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
        if self._handle is not None:
            self._handle.cancel()
            self._handle, self.at = None, _NEVER

    def _fire(self) -> None:
        # A timer may fire a clock tick early; using the armed time as now ensures that its deadline counts as due.
        now = max(self._clock().now(), self.at)
        self._not_before = now + self._rest_s
        # Reset before `due` runs, since that may arm the timer for what it brings about.
        self._handle, self.at = None, _NEVER
        self._due(now)
