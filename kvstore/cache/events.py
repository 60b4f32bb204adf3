"""A numbered log of what entered and left a prefix cache: tokenizers route by it, a directory learns who holds what.

The prefix cache appends; the scheduler drains once a step and publishes on topic `kv_events`. Memory is bounded: if
nobody drains for too long, undrained events are replaced by `CacheCleared` and the whole cache at the next drain.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.hashing import TOKEN_BYTES, unpack_tokens
from kvstore.protocol import CacheCleared, CacheEvent, CacheEvents, PageRemoved, PageStored

DEFAULT_LIMIT: Final = 65_536
"""About 60 MB with pages of 16 tokens; more than a cache of 50,000 pages states, or stating it anew would overflow."""


class EventLog:
    """Undrained events of one cache. `snapshot` returns the events that build the cache from scratch."""

    def __init__(self, snapshot: Callable[[], Iterable[PageStored]], group: str, limit: int = DEFAULT_LIMIT) -> None:
        self._snapshot = snapshot
        self._group = group
        self._limit = limit
        self._pending: deque[CacheEvent] = deque()
        self._overflowed = False
        self.sequence = 0
        # What leaves the cache can be read from the host's disk: whoever sends requests where prefixes are should know.
        self.is_on_disk = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to drain."""
        return bool(self._pending) or self._overflowed

    def stored(
        self, tokens: bytes, hashes: Sequence[bytes], parents: Sequence[bytes], which: Iterable[int], extra_key: str
    ) -> None:
        """Full pages: those at the indices `which`. `tokens` are packed, as many for each page."""
        group, token_ids, size = self._group, unpack_tokens(tokens), len(tokens) // TOKEN_BYTES // max(1, len(hashes))
        # At once: a long prompt has a thousand pages, and each call costs as much as its event.
        self._extend(
            [
                PageStored(
                    group=group,
                    page_hash=hashes[index],
                    parent_hash=parents[index],
                    token_ids=list(token_ids[index * size : index * size + size]),
                    extra_key=extra_key,
                )
                for index in which
            ]
        )

    def removed(self, page_hashes: list[bytes]) -> None:
        if page_hashes:
            self._extend([PageRemoved(group=self._group, page_hashes=page_hashes, on_disk=self.is_on_disk)])

    def cleared(self) -> None:
        """The cache is empty, or is stated anew from here; events not drained yet no longer matter."""
        self._pending.clear()
        self._overflowed = False
        self._extend([CacheCleared(group=self._group, on_disk=self.is_on_disk)])

    def drain(self, max_events: int | None = None) -> list[CacheEvent]:
        if self._overflowed:
            self.restate()
        number = len(self._pending) if max_events is None else min(max_events, len(self._pending))
        return [self._pending.popleft() for _ in range(number)]

    def drain_message(self, max_events: int = 1024) -> CacheEvents | None:
        events = self.drain(max_events)
        return CacheEvents(events=events) if events else None

    def restate(self) -> None:
        """Queue the whole cache again from the start, for followers that missed too much."""
        self.cleared()
        stored = list(self._snapshot())
        self._pending.extend(stored)
        self.sequence += len(stored)

    def _extend(self, events: Sequence[CacheEvent]) -> None:
        self.sequence += len(events)
        if len(self._pending) + len(events) > self._limit:
            # Followers get the whole cache at the next drain, so no event is kept until then.
            self._overflowed = True
            self._pending.clear()
        if not self._overflowed:
            self._pending.extend(events)
