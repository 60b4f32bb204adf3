"""Times how a scheduler rebuilds its cache from its predecessor's page table, by the size of the pool.

The pool is full: prompts of 64 pages, the first 8 shared by every 16 prompts; a fifth were still running when their
scheduler died, each with a partly filled page. Each figure is printed with its floor: every slot's CRC and every full
page's hash, computed once.

    python -m benchmarks.rebuild
"""

import random
import statistics
import time
import zlib

from kvstore.cache.page_table import PageTable
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.rebuild import rebuild
from kvstore.hashing import page_hash

PAGE_SIZE = 16
PROMPT_PAGES = 64
COMMON_PAGES = 8
ROUNDS = 5


def full_table(num_pages: int) -> bytes:
    """The table of a pool of `num_pages` whose scheduler died while it was working."""
    memory = bytearray(PageTable.num_bytes(num_pages, PAGE_SIZE))
    table = PageTable(memoryview(memory), num_pages, PAGE_SIZE)
    cache = PrefixCache(num_pages, PAGE_SIZE, group="m", epoch=1, table=table)
    draw = random.Random(1)
    own_tokens = (PROMPT_PAGES - COMMON_PAGES) * PAGE_SIZE
    common: list[int] = []
    number = 0
    while cache.num_available() - cache.blocks.tree.num_evictable > PROMPT_PAGES:
        if number % 16 == 0:
            common = [draw.randrange(32_000) for _ in range(COMMON_PAGES * PAGE_SIZE)]
        tokens = common + [draw.randrange(32_000) for _ in range(own_tokens + 5)]
        held = cache.start(tokens)
        assert held.reserve(len(tokens))
        held.advance(tokens[held.num_tokens :])
        if number % 5:
            held.release()
        number += 1
    return bytes(memory)


def measure(before: bytes, num_pages: int) -> tuple[float, float, int]:
    """Median CPU seconds to rebuild, and to read and hash only; and how many pages are cached afterwards."""
    took: list[float] = []
    floor: list[float] = []
    num_cached = 0
    size = PageTable.num_bytes(1, PAGE_SIZE) // 2
    for _ in range(ROUNDS):
        memory = bytearray(before)
        began = time.process_time()
        found = rebuild(PageTable(memoryview(memory), num_pages, PAGE_SIZE), group="m", epoch=2)
        took.append(time.process_time() - began)
        num_cached = found.cache.blocks.tree.num_pages
        began = time.process_time()
        for start in range(0, len(before), 2 * size):
            zlib.crc32(before[start : start + size])
            zlib.crc32(before[start + size : start + 2 * size])
            page_hash(before[start : start + 16], before[start : start + 64])
        floor.append(time.process_time() - began)
    return statistics.median(took), statistics.median(floor), num_cached


def main() -> None:
    """Prints one line per size."""
    for num_pages in (4_000, 16_000, 50_000):
        took, floor, num_cached = measure(full_table(num_pages), num_pages)
        print(
            f"{num_pages:>6} pages, {num_cached} cached again: {took * 1e3:8.1f} ms, "
            f"{took / num_pages * 1e6:.1f} us a page; CRCs and hashes alone {floor * 1e3:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
