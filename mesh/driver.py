"""Drives a pure core: gives it one event at a time and performs what it wants done before it gets the next.

    feed(event) --> handle(event) --> command, command, ... --> perform --+
         ^                                                                |
         +----------------- an event that performing brings about --------+   queued, never recursed into

For actors whose commands may answer at once (a copy that is refused, a step that needs no thread).
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Event = TypeVar("Event")
Command = TypeVar("Command")


class CoreDriver(Generic[Event, Command]):
    """See the module. What `handle` or `perform` raises goes to the feeder; events left then wait for the next one."""

    def __init__(self, handle: Callable[[Event], Iterable[Command]], perform: Callable[[Command], None]) -> None:
        self._handle = handle
        self._perform = perform
        self._events: deque[Event] = deque()
        self._is_handling = False

    def feed(self, event: Event) -> bool:
        """Handle an event and all that come of it.

        Returns False when called by `perform`: the event waits for its turn, and who fed the first is told True.
        """
        self._events.append(event)
        if self._is_handling:
            return False
        self._is_handling = True
        try:
            while self._events:
                for command in self._handle(self._events.popleft()):
                    self._perform(command)
        finally:
            self._is_handling = False
        return True
