"""This scheduler's load reports for routing: on change, at most ten times a second, none when idle."""

from nodes.protocol import Load
from nodes.roles import LOAD_TOPIC
from nodes.scheduler.books import Books

LOAD = "load"
LOAD_INTERVAL_S = 0.1
"""Choices between two reports are counted by who makes them, so more reports would change little."""


class LoadReports:
    """Publishes `Load`. Pages that only the cache holds count as free, because they are evicted when needed."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._last: Load | None = None
        self._not_before = 0.0

    def report(self, now: float) -> None:
        """Publish if something changed and the last report is old enough; if it is too young, do it later."""
        if now < self._not_before:
            self._books.deadlines.set_default((LOAD, ""), self._not_before)
            return
        books = self._books
        load = Load(
            num_running=books.num_entered,
            num_waiting=len(books.queue),
            num_free_pages=books.cache.num_available(),
            num_pages=books.cache.num_pages,
            num_waiting_tokens=books.queue.num_tokens(),
            # Whole tokens: what is behind the point would only make equal reports unequal.
            prefill_tokens_per_s=float(round(books.prefills.per_second)),
        )
        if load != self._last:
            self._last = load
            self._not_before = now + LOAD_INTERVAL_S
            self._books.outbox.publish(LOAD_TOPIC, load)
