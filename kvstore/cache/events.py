"""A log of what entered and left a prefix cache: tokenizers route by it, a directory learns who holds what.

The prefix cache appends; the scheduler drains once a step and publishes on topic `kv_events`. Memory is bounded: if
nobody drains for too long, undrained events are replaced by `CacheCleared` and the whole cache at the next drain.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.cache.radix_tree import Node
from kvstore.protocol import CacheCleared, CacheEvent, CacheEvents, PageRemoved, PagesStored

MESSAGE_PAGES: Final = 1024
"""The most pages of an event, and of a message: 82 KB with pages of 16 tokens that are one event."""
DEFAULT_LIMIT: Final = 128
"""Messages, of 65,000 pages or more: 46 MB if each page of 16 tokens came by itself, 20 MB in runs of seven."""


class EventLog:
    """Undrained events of one cache, as the messages that they will be. `runs` are all its pages (`RadixTree.runs`)."""

    def __init__(
        self, runs: Callable[[], Iterable[tuple[Node, bytes]]], group: str, limit: int = DEFAULT_LIMIT
    ) -> None:
        self._runs = runs
        self._group = group
        self._limit = self._most = limit
        self._messages: deque[list[CacheEvent]] = deque()
        self._room = 0
        self._overflowed = False
        # What leaves the cache can be read from the host's disk: whoever sends requests where prefixes are should know.
        self.is_on_disk = False

    @property
    def has_news(self) -> bool:
        """Whether there is anything to drain."""
        return bool(self._messages) or self._overflowed

    def stored(self, tokens: bytes, hashes: Sequence[bytes], parent: bytes, extra_key: str) -> None:
        """Full pages, each the parent of the next, `parent` that of the first. `tokens` are packed, as many each."""
        stride = len(tokens) // max(1, len(hashes))
        for first in range(0, len(hashes), MESSAGE_PAGES):
            run = list(hashes[first : first + MESSAGE_PAGES])
            packed = tokens[first * stride : (first + len(run)) * stride]
            event = PagesStored(
                group=self._group, page_hashes=run, parent_hash=parent, tokens=packed, extra_key=extra_key
            )
            self._add(event, len(run))
            parent = run[-1]

    def removed(self, page_hashes: Sequence[bytes]) -> None:
        for first in range(0, len(page_hashes), MESSAGE_PAGES):
            some = list(page_hashes[first : first + MESSAGE_PAGES])
            self._add(PageRemoved(group=self._group, page_hashes=some, on_disk=self.is_on_disk), len(some))

    def cleared(self, *, is_disk_new: bool = False) -> None:
        """The cache is empty, or is stated anew from here; events not drained yet no longer matter.

        `is_disk_new`: nor does what was said to be on disk.
        """
        self._messages.clear()
        self._overflowed = False
        self._most = self._limit
        self._add(CacheCleared(group=self._group, on_disk=self.is_on_disk and not is_disk_new), 1)

    def drain_message(self) -> CacheEvents | None:
        if self._overflowed:
            self.restate()
        return CacheEvents(events=self._messages.popleft()) if self._messages else None

    def restate(self, *, is_disk_new: bool = False) -> None:
        """Queue the whole cache again from the start, for followers that missed too much, or as in `cleared`."""
        self.cleared(is_disk_new=is_disk_new)
        # Whatever its size: beyond the limit comes what changes later.
        self._most = sys.maxsize
        for node, parent in self._runs():
            # The extra key is not kept for each page; hashes alone identify pages.
            self.stored(node.key, node.hashes, parent, "")
        self._most = len(self._messages) + self._limit

    def _add(self, event: CacheEvent, num_pages: int) -> None:
        if self._overflowed:
            return
        if num_pages > self._room or not self._messages:
            if len(self._messages) >= self._most:
                # Followers get the whole cache at the next drain, so no event is kept until then.
                self._overflowed = True
                self._messages.clear()
                return
            self._messages.append([])
            self._room = MESSAGE_PAGES
        self._room -= num_pages
        self._messages[-1].append(event)
