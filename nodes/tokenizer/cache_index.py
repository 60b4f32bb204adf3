"""Which pages are in one scheduler's prefix cache, by its events. Pure; used by `nodes/tokenizer/routing.py`."""

from kvstore.protocol import CacheCleared, PageRemoved, PageStored


class CacheIndex:
    """Hashes of at most `max_pages` cached pages, oldest forgotten first; each covers all up to its page's end."""

    __slots__ = ("_hashes", "_max_pages")

    def __init__(self, max_pages: int) -> None:
        self._hashes: dict[bytes, None] = {}
        self._max_pages = max_pages

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, event: PageStored | PageRemoved | CacheCleared) -> None:
        if isinstance(event, PageStored):
            self._hashes.pop(event.page_hash, None)
            self._hashes[event.page_hash] = None
            if len(self._hashes) > self._max_pages:
                del self._hashes[next(iter(self._hashes))]
        elif isinstance(event, PageRemoved):
            for page_hash in event.page_hashes:
                self._hashes.pop(page_hash, None)
        else:
            self.clear()

    def clear(self) -> None:
        self._hashes.clear()
