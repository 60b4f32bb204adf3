"""What followers of a scheduler's cache are told: each change in order, and everything again if one missed too much.

A follower that missed more publications than are kept has to start from nothing. All followers then get the whole cache
again, because they share one numbering; at most once per `RESTATE_PAUSE_S`, because a follower that keeps losing
publications would leave this scheduler time for nothing else. Pure; owned by the core.
"""

from collections.abc import Callable
from typing import Final

from nodes.roles import KV_EVENTS_TOPIC
from nodes.scheduler.books import Books

NEWS: Final = "cache_news"
GATHER_S: Final = 0.05
"""How long changes wait for others. A request makes two publications, each a message to every tokenizer. Routing misses
a prefix by it only where a second request for it comes within this time, as it did before within a message's way."""
RESTATE: Final = "restate"
RESTATE_PAUSE_S: Final = 5.0
"""Stating 50,000 pages of 16 tokens takes 20 ms, and 4.6 MB to each follower."""


class CacheNews:
    """Publishes what the cache's event log has gathered; calls `restated` when it begins to state everything again."""

    def __init__(self, books: Books, restated: Callable[[float], None]) -> None:
        self._books = books
        self._events = books.cache.events
        self._restated = restated
        self._not_before = float("-inf")
        self._is_disk_new = False
        self.num_restated = 0

    def gather(self, now: float) -> None:
        """See to it that what has changed is published soon."""
        if self._events.has_news:
            self._books.deadlines.set_default((NEWS, ""), now + GATHER_S)

    def publish(self) -> None:
        while (events := self._events.drain_message()) is not None:
            self._books.outbox.publish(KV_EVENTS_TOPIC, events)

    def restate(self, topic: str, now: float) -> None:
        """A follower of `topic` starts from nothing: state the whole cache again, now or after the pause."""
        if topic != KV_EVENTS_TOPIC:
            return  # each load report is complete by itself
        if now < self._not_before:
            self._books.deadlines.set_default((RESTATE, topic), self._not_before)
            return
        self._not_before = now + RESTATE_PAUSE_S
        self.num_restated += 1
        self._events.restate(is_disk_new=self._is_disk_new)
        self._is_disk_new = False
        self._restated(now)

    def disk_changed(self, now: float) -> None:
        """What was told to be on disk is there no more: the same, and what is there now."""
        self._is_disk_new = True
        self.restate(KV_EVENTS_TOPIC, now)
