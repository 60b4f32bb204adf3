"""Which pages are in one scheduler's prefix cache, or were and can be read from its host's disk, by its events.

Pure; used by `nodes/tokenizer/routing.py`.
"""

from collections.abc import Iterable

from kvstore.hashing import split_hashes
from kvstore.protocol import CacheEvent, PageRemoved, PagesOnDisk, PageStored


class CacheIndex:
    """Hashes of at most `max_pages` cached pages, and of as many on disk, oldest forgotten first.

    Each covers all up to its page's end. Reading a page takes a small part of the time of computing it, so both count
    alike. What the disk has given up since is not told: a request sent there for it is computed.
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
        hashes, on_disk, most = self._hashes, self._on_disk, self._max_pages
        for event in events:
            if isinstance(event, PageStored):
                # Without calls: each page of each prompt comes here, twice if it is prefilled elsewhere. They were an
                # eighth of a tokenizer's.
                page_hash = event.page_hash
                on_disk.pop(page_hash, None)
                hashes.pop(page_hash, None)
                hashes[page_hash] = None
                if len(hashes) > most:
                    del hashes[next(iter(hashes))]
            elif isinstance(event, PageRemoved):
                for page_hash in event.page_hashes:
                    hashes.pop(page_hash, None)
                    if event.on_disk:
                        self._keep_on_disk(page_hash)
            elif isinstance(event, PagesOnDisk):
                for page_hash in split_hashes(event.hashes):
                    # What is cached goes to the disk's when it leaves the cache, if it is to be looked for there.
                    if page_hash not in hashes:
                        self._keep_on_disk(page_hash)
            else:
                # A scheduler that starts again states its cache anew, while its host's disk has what it had.
                cached = list(hashes)
                hashes.clear()
                if not event.on_disk:
                    on_disk.clear()
                    continue
                for page_hash in cached:
                    self._keep_on_disk(page_hash)

    def clear(self) -> None:
        """What is cached is not known any more."""
        self._hashes.clear()

    def _keep_on_disk(self, page_hash: bytes) -> None:
        hashes = self._on_disk
        hashes.pop(page_hash, None)
        hashes[page_hash] = None
        if len(hashes) > self._max_pages:
            del hashes[next(iter(hashes))]
