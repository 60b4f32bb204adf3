"""One loop timer for many deadlines. Used by links and by both sides of calls, which may have thousands in flight."""

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """Calls `expire(now)` at the earliest deadline; armed again as long as `next_deadline()` names one.

    Arming for a later deadline than the one armed costs a comparison, which is what nearly every call pays.
    """

    __slots__ = ("_at", "_expire", "_handle", "_loop", "_next_deadline")

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
        self._at = 0.0

    def arm(self, deadline: float) -> None:
        """A call with this deadline was opened."""
        if self._handle is not None:
            if self._at <= deadline:
                return
            self._handle.cancel()
        self._at = deadline
        self._handle = self._loop.call_at(deadline, self._fire)

    def cancel(self) -> None:
        """Nothing is waited for any longer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        # A timer may fire a clock tick early; a deadline is never missed by taking the armed time for now.
        self._expire(max(self._loop.time(), self._at))
        deadline = self._next_deadline()
        if deadline is not None:
            self.arm(deadline)
