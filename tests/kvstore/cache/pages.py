"""What tests of the cache share: a page table in this process, and sequences that hold pages."""

from collections.abc import Sequence

from kvstore.cache.block_table import BlockTable
from kvstore.cache.page_table import EntryRun, PageEntry, PageTable
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.hashing import NO_HASH
from kvstore.protocol import CacheEvent

PAGE_SIZE = 4


def make_table(num_pages: int = 4, page_size: int = PAGE_SIZE) -> tuple[PageTable, bytearray]:
    """A fresh table and the memory that it lies in."""
    memory = bytearray(PageTable.num_bytes(num_pages, page_size))
    return PageTable(memoryview(memory), num_pages, page_size), memory


def entry_of(table: PageTable, page: int) -> PageEntry:
    entry = table.read(page)
    assert isinstance(entry, PageEntry)
    return entry


def entries_of(run: EntryRun) -> list[PageEntry]:
    """The same, one by one."""
    num_pages = len(run.states)
    stride = len(run.tokens) // max(1, num_pages)
    hashes = run.page_hashes or [NO_HASH] * num_pages
    parents = [run.parent, *hashes[:-1]]
    return [
        PageEntry(
            run.states[index],
            run.generations[index],
            run.owner_epoch,
            hashes[index],
            parents[index],
            run.tokens[index * stride : (index + 1) * stride],
            run.is_first and index == 0,
            run.is_private,
        )
        for index in range(num_pages)
    ]


def drained(cache: PrefixCache) -> list[CacheEvent]:
    """What followers of the cache have not been told yet, which they now have."""
    return [event for message in iter(cache.events.drain_message, None) for event in message.events]


def holding(cache: PrefixCache, token_ids: Sequence[int], num_tokens: int = 0, key: str = "") -> BlockTable:
    """A sequence with pages for `num_tokens`, or for all it has; nothing is computed."""
    sequence = cache.start(list(token_ids), key)
    assert sequence.reserve(num_tokens or len(token_ids))
    return sequence
