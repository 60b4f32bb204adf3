"""What the host's disk has, for those who route by it and have not seen it go there.

A tokenizer hears of a page on disk when that leaves a cache. Of what was there before, when all of a mesh has started
again or a tokenizer has, it would know nothing, and send a prompt to any host, while its pages are on one host's disk.
So a scheduler asks its agent, part by part, when it has begun and when it states its cache anew, and publishes each
part as it comes. The news is soft: what the disk gives up later is asked for there in vain, and computed. Pure; owned
by the core.
"""

from typing import Final

from kvstore.protocol import CacheEvents, ListStoredPages, PagesOnDisk, StoredPagesListed
from nodes.roles import KV_EVENTS_TOPIC
from nodes.scheduler.asks import ASK_TIMEOUT_S
from nodes.scheduler.books import Books
from nodes.scheduler.events import Tag

LIST: Final = "list_stored"
_RETRY_S: Final = 2.0
"""Which pages there are is read within 2 s for 1,000,000 of them, and nobody's request waits for this."""
_GIVE_UP_S: Final = 120.0
"""An agent that is away this long is listed when this scheduler states its cache anew; routing does without it."""


class DiskNews:
    """Lists what is on disk for followers: pages of the worker's numerics now, which alone are good here."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._last: Tag = (LIST, "0")
        self._until = 0.0

    def begin(self, now: float) -> None:
        """List everything, anew if a list is under way; nothing without a disk, or before there is a worker."""
        self._books.asks.stop(self._last)
        if self._books.config.stores and self._books.numerics:
            self._until = now + _GIVE_UP_S
            self._ask(0, -1)

    def on_listed(self, tag: Tag, message: StoredPagesListed) -> None:
        """The agent has answered: publish that part and ask for the next one."""
        # A late answer of a list that was begun again, whose next part is another one's.
        if not self._books.asks.answered(tag):
            return
        if message.hashes:
            told = PagesOnDisk(group=self._books.config.group, hashes=message.hashes)
            self._books.outbox.publish(KV_EVENTS_TOPIC, CacheEvents(events=[told]))
        if message.next_slot > 0:
            self._ask(message.next_slot, message.used_after)

    def _ask(self, first_slot: int, used_after: int) -> None:
        # Numbered, so that each answer is known for its own ask's.
        self._last = (LIST, str(int(self._last[1]) + 1))
        config = self._books.config
        message = ListStoredPages(
            group=config.group, numerics=self._books.numerics, first_slot=first_slot, used_after=used_after
        )
        self._books.asks.start(
            self._last, config.agent, message, timeout_s=ASK_TIMEOUT_S, retry_s=_RETRY_S, give_up_at=self._until
        )
