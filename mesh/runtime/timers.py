"""One loop timer for many deadlines. Used by links and by both sides of calls, which may have thousands in flight."""

import asyncio
from collections.abc import Callable
from typing import Final

_NEVER: Final = float("inf")


class DeadlineTimer:
    """Calls `expire(now)` at the earliest deadline; armed again as long as `next_deadline()` names one.

    Nearly every call has a later deadline than the one armed: who is in a hurry compares with `at` and need not arm.
    """

    __slots__ = ("_expire", "_handle", "_loop", "_next_deadline", "at")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        next_deadline: Callable[[], float | None],
        expire: Callable[[float], None],
    ) -> None:
        self._loop = loop
        self._next_deadline = next_deadline
        self._expire = expire
        self._handle: asyncio.TimerHandle | None = None
        self.at = _NEVER

    def arm(self, deadline: float) -> None:
        """A call with this deadline was opened."""
        if self.at <= deadline:
            return
        if self._handle is not None:
            self._handle.cancel()
        self.at = deadline
        self._handle = self._loop.call_at(deadline, self._fire)

    def cancel(self) -> None:
        """Nothing is waited for any longer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle, self.at = None, _NEVER

    def _fire(self) -> None:
        # A timer may fire a clock tick early; a deadline is never missed by taking the armed time for now.
        now = max(self._loop.time(), self.at)
        # Before what is due is done, since that may arm for what it brings about.
        self._handle, self.at = None, _NEVER
        self._expire(now)
        deadline = self._next_deadline()
        if deadline is not None:
            self.arm(deadline)
