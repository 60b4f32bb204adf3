"""What followers are told of a scheduler's cache: each change in order, and everything again for who missed too much.

A follower whose gap is larger than what publications are kept has to begin from nothing. All followers are given the
whole cache then, because they share one numbering; at most every `RESTATE_PAUSE_S`, for a follower that loses what it
is given would keep this scheduler at nothing else. Pure; owned by the core.
"""

from typing import Final

from kvstore.cache.prefix_cache import PrefixCache
from mesh.runtime.deadlines import Deadlines
from nodes.roles import KV_EVENTS_TOPIC
from nodes.scheduler.events import Outbox, Publish

RESTATE: Final = "restate"
RESTATE_PAUSE_S: Final = 5.0
"""50,000 pages are stated in 0.1 s."""


class CacheNews:
    """Publishes what the cache's event log has gathered."""

    def __init__(self, cache: PrefixCache, outbox: Outbox, deadlines: Deadlines) -> None:
        self._events = cache.events
        self._outbox = outbox
        self._deadlines = deadlines
        self._not_before = float("-inf")
        self.num_restated = 0

    def publish(self) -> None:
        """Say what changed since the last time."""
        while (events := self._events.drain_message()) is not None:
            self._outbox.add(Publish(KV_EVENTS_TOPIC, events))

    def restate(self, topic: str, now: float) -> None:
        """A follower of `topic` begins from nothing: the next publications say all there is, now or soon."""
        if topic != KV_EVENTS_TOPIC:
            return  # loads are said whole each time
        if now < self._not_before:
            self._deadlines.set_default((RESTATE, topic), self._not_before)
            return
        self._not_before = now + RESTATE_PAUSE_S
        self.num_restated += 1
        self._events.restate()
