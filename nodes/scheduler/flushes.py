"""Asks to forget every cached prefix: answered once nothing runs any more, or refused if something still does.

A client that has its answer may ask at once, while what the answer needed is still on its way out: a stop string is
told to the scheduler, a step of what has ended is at the worker, a prefill is let go by the scheduler it was for. Pure;
owned by the core.
"""

from collections.abc import Callable
from typing import Any, Final

from kvstore.cache.allocator import PageState
from nodes.protocol import CacheFlushed
from nodes.protocol.control import BUSY
from nodes.scheduler.books import Books

FLUSH: Final = "flush"
PATIENCE_S: Final = 1.0
"""Two steps of a large model on a CPU are some hundred milliseconds. Half of what the gateway waits for the answer."""


class Flushes:
    """Those that wait; how many is bounded by how many calls an actor has open.

    `hurry` sends what else would wait for company, so that no other scheduler is kept busy by this one.
    """

    def __init__(self, books: Books, is_idle: Callable[[], bool], hurry: Callable[[], None]) -> None:
        self._books = books
        self._is_idle = is_idle
        self._hurry = hurry
        self._waiting: list[tuple[Any, float]] = []

    def ask(self, call: Any, now: float) -> None:
        self._hurry()
        self._waiting.append((call, now + PATIENCE_S))
        self._books.deadlines.set_default((FLUSH, ""), now + PATIENCE_S)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Called at each wake: answer all if nothing runs, else refuse those that have waited long enough."""
        if not self._waiting:
            return
        is_idle, left = self._is_idle(), list[tuple[Any, float]]()
        for call, until in self._waiting:
            if is_idle:
                num_pages = self._books.cache.num_pages_in(PageState.CACHED)
                self._books.cache.reset()
                self._books.outbox.reply(call, CacheFlushed(num_pages=num_pages))
            elif now >= until:
                self._books.outbox.refuse(call, BUSY, "requests are under way here", retryable=True)
            else:
                left.append((call, until))
        self._waiting = left
        self._books.deadlines.clear((FLUSH, ""))
        if left:
            self._books.deadlines.set((FLUSH, ""), left[0][1])
