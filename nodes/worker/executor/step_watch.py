"""Watches whether the current step ends in time.

A thread that computes cannot be stopped, so a step that hangs is the end of its process. Steps end in the order in
which they begin; the time of one launched behind another starts when that one ends. Part of the worker's actor.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from nodes.worker.steps.step import RunnableStep


class CallLater(Protocol):
    """As `Context.later`."""

    def __call__(self, delay_s: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        """Call back after `delay_s`."""
        ...


class StepWatch:
    """Calls `hangs` with the step that has not ended within its `timeout_s`."""

    def __init__(self, call_later: CallLater, hangs: Callable[[RunnableStep], None]) -> None:
        self._call_later = call_later
        self._hangs = hangs
        self._running: deque[RunnableStep] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def begun(self, step: RunnableStep) -> None:
        """A step runs, or waits behind the one that does."""
        self._running.append(step)
        # The time of a step that waits behind another is not running yet: the device has not begun it.
        if len(self._running) == 1:
            self._arm()

    def ended(self) -> None:
        """The oldest step has ended; does nothing after `stop`."""
        if self._running:
            self._running.popleft()
        self._arm()

    def stop(self) -> None:
        self._running.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            self._timer = self._call_later(self._running[0].timeout_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._hangs(self._running[0])
