"""Which pages are in one scheduler's prefix cache, or were and can be read from its host's disk, by its events.

Pure; used by `nodes/tokenizer/routing/core.py`.
"""

from collections.abc import Iterable
from itertools import islice

from kvstore.hashing import split_hashes
from kvstore.protocol import CacheEvent, PageRemoved, PagesOnDisk, PagesStored


class CacheIndex:
    """Hashes of at most `max_pages` cached pages, and of as many on disk, oldest forgotten first.

    Each covers all up to its page's end. Reading a page takes a small part of the time of computing it, so both count
    alike. What the disk has given up since is not told, unless that is all: a request sent there for it is computed.
    """

    __slots__ = ("_hashes", "_max_pages", "_on_disk")

    def __init__(self, max_pages: int) -> None:
        self._hashes: dict[bytes, None] = {}
        self._on_disk: dict[bytes, None] = {}
        self._max_pages = max_pages

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._hashes or page_hash in self._on_disk

    def __len__(self) -> int:
        return len(self._hashes) + len(self._on_disk)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Changes in the order in which the scheduler made them."""
        hashes, on_disk = self._hashes, self._on_disk
        for event in events:
            if isinstance(event, PagesStored):
                for page_hash in event.page_hashes:
                    on_disk.pop(page_hash, None)
                self._keep(hashes, event.page_hashes)
            elif isinstance(event, PageRemoved):
                for page_hash in event.page_hashes:
                    hashes.pop(page_hash, None)
                if event.on_disk:
                    self._keep(on_disk, event.page_hashes)
            elif isinstance(event, PagesOnDisk):
                # What is cached goes to the disk's when it leaves the cache, if it is to be looked for there.
                self._keep(on_disk, [one for one in split_hashes(event.hashes) if one not in hashes])
            else:
                # A scheduler that starts again states its cache anew, while its host's disk has what it had.
                cached = list(hashes)
                hashes.clear()
                if event.on_disk:
                    self._keep(on_disk, cached)
                else:
                    on_disk.clear()

    def clear(self) -> None:
        """What is cached is not known any more."""
        self._hashes.clear()

    def _keep(self, kept: dict[bytes, None], page_hashes: list[bytes]) -> None:
        for page_hash in page_hashes:
            kept.pop(page_hash, None)
            kept[page_hash] = None
        if (num_over := len(kept) - self._max_pages) > 0:
            # A 64th more than must: the search for a dict's first passes all that were deleted before it, which cost
            # 25 us for each page of an index of 262,144 pages that was full.
            for page_hash in list(islice(kept, num_over + self._max_pages // 64)):
                del kept[page_hash]
