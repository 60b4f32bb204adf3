"""This scheduler's load reports for routing: on change, at most ten times a second, none when idle."""

from kvstore.cache.prefix_cache import PrefixCache
from mesh.runtime.deadlines import Deadlines
from nodes.protocol import Load
from nodes.roles import LOAD_TOPIC
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.events import Outbox
from nodes.scheduler.queue.policy import WaitingQueue
from nodes.scheduler.rates import LearnedRate

LOAD = "load"
LOAD_INTERVAL_S = 0.1
"""Choices between two reports are counted by who makes them, so more reports would change little."""


class LoadReports:
    """Publishes `Load`. Pages that only the cache holds count as free, because they are evicted when needed."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        queue: WaitingQueue,
        outbox: Outbox,
        deadlines: Deadlines,
        prefills: LearnedRate,
    ) -> None:
        self._config = config
        self._cache = cache
        self._queue = queue
        self._outbox = outbox
        self._deadlines = deadlines
        self._prefills = prefills
        self._last: Load | None = None
        self._not_before = 0.0

    def report(self, num_running: int, now: float) -> None:
        """Publish if something changed and the last report is old enough; if it is too young, do it later."""
        if now < self._not_before:
            self._deadlines.set_default((LOAD, ""), self._not_before)
            return
        load = Load(
            num_running=num_running,
            num_waiting=len(self._queue),
            num_free_pages=self._cache.num_available(),
            num_pages=self._cache.num_pages,
            num_waiting_tokens=self._queue.num_tokens(),
            # Whole tokens: what is behind the point would only make equal reports unequal.
            prefill_tokens_per_s=float(round(self._prefills.per_second)),
        )
        if load != self._last:
            self._last = load
            self._not_before = now + LOAD_INTERVAL_S
            self._outbox.publish(LOAD_TOPIC, load)
