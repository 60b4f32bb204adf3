import gc
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kvstore.cache.allocator import PageAllocator, PageState
from kvstore.cache.block_table import BlockTable
from kvstore.cache.page_table import PageTable, Torn
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.rebuild import Rebuilt, rebuild
from kvstore.hashing import pack_tokens, root_hash
from kvstore.protocol import CacheCleared, PagesStored
from tests.kvstore.cache.pages import PAGE_SIZE, drained, entry_of, holding, make_table

NUM_PAGES = 16


class Dead:
    """A scheduler's cache over a table, to be killed by forgetting it."""

    def __init__(self) -> None:
        self.table, self.memory = make_table(NUM_PAGES)
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE, group="g", epoch=1, table=self.table)

    def run(self, token_ids: list[int], key: str = "", num_filled: int | None = None) -> BlockTable:
        sequence = holding(self.cache, token_ids, key=key)
        stop = len(token_ids) if num_filled is None else num_filled
        sequence.advance(token_ids[sequence.num_tokens : stop])
        return sequence

    def rebuild(self) -> Rebuilt:
        rebuilt = rebuild(PageTable(memoryview(self.memory), NUM_PAGES, PAGE_SIZE), group="g", epoch=2)
        assert rebuilt.cache.check() == []
        return rebuilt


@pytest.fixture
def dead() -> Dead:
    return Dead()


def test_a_cache_is_the_same_after_its_scheduler_died(dead: Dead) -> None:
    prompts = [[1] * 9, [1, 1, 1, 1, 2, 2, 2, 2, 0], [1] * 13, [3] * 5]
    for prompt in prompts:
        dead.run(prompt).release()
    dead.run([1] * 9, "salt").release()
    before = {(key, tuple(prompt)): dead.cache.match(prompt, key) for prompt in prompts for key in ("", "salt")}
    rebuilt = dead.rebuild()
    for (key, prompt), match in before.items():
        assert rebuilt.cache.match(prompt, key)[:2] == match[:2], "the same pages, in nodes of another tree"
    assert rebuilt.cache.num_available() == NUM_PAGES - 1
    assert (len(rebuilt.recovered), rebuilt.quarantined, rebuilt.num_torn) == (0, [], 0)
    events = drained(rebuilt.cache)
    assert events[0] == CacheCleared(group="g")
    known = {root_hash(), root_hash("salt")}
    for event in events[1:]:
        assert isinstance(event, PagesStored)
        assert event.parent_hash in known
        known.update(event.page_hashes)
    assert len(known) == 2 + rebuilt.cache.num_pages_in(PageState.CACHED)


def test_a_running_sequence_can_be_claimed_with_its_partly_filled_page(dead: Dead) -> None:
    tokens = list(range(11))
    pages = list(dead.run(tokens, "salt", num_filled=10).pages)
    rebuilt = dead.rebuild()
    assert len(rebuilt.recovered) == 1
    assert rebuilt.recovered.claim(tokens) is None, "another extra key"
    assert rebuilt.recovered.claim(tokens[:10], "salt") is None, "its last token must be computed"
    assert rebuilt.recovered.claim([*tokens[:9], 99, 1], "salt") is None
    claimed = rebuilt.recovered.claim(tokens, "salt")
    assert claimed is not None
    assert (claimed.pages, claimed.num_tokens, claimed.num_cached_tokens) == (pages, 10, 8)
    assert len(rebuilt.recovered) == 0
    drained(rebuilt.cache)
    claimed.reserve(13)
    claimed.advance([10, 11])
    [stored] = drained(rebuilt.cache)
    assert isinstance(stored, PagesStored)
    assert (stored.tokens, stored.extra_key) == (pack_tokens([8, 9, 10, 11]), "salt")
    assert rebuilt.cache.match([*tokens, 11, 0], "salt").num_tokens == 12
    claimed.release()
    assert rebuilt.cache.num_available() == NUM_PAGES - 1
    assert rebuilt.cache.check() == []


def test_the_longest_sequence_is_claimed_first(dead: Dead) -> None:
    for num_filled in (5, 7, 6):
        dead.run([1] * 8, num_filled=num_filled)
    dead.run([2, 2], num_filled=2)
    dead.run([2], num_filled=0)
    rebuilt = dead.rebuild()
    assert len(rebuilt.recovered) == 5
    lengths = [claimed.num_tokens for _ in range(3) if (claimed := rebuilt.recovered.claim([1] * 9))]
    assert lengths == [7, 6, 5]
    more = [claimed.num_tokens for _ in range(2) if (claimed := rebuilt.recovered.claim([2, 2, 2])) is not None]
    assert more == [2, 0]


def test_pages_of_recovered_sequences_are_held_until_the_lease_is_over(dead: Dead) -> None:
    dead.run([1] * 9)
    rebuilt = dead.rebuild()
    assert rebuilt.cache.num_available() == NUM_PAGES - 1 - 3
    other = rebuilt.cache.start([5])
    assert not other.reserve(13 * PAGE_SIZE)
    rebuilt.recovered.release()
    assert rebuilt.cache.num_available() == NUM_PAGES - 1
    assert rebuilt.cache.match([1] * 9).num_tokens == 8
    assert other.reserve(13 * PAGE_SIZE)


def test_lent_and_torn_pages_are_quarantined(dead: Dead) -> None:
    lent = holding(dead.cache, [1] * 5).export().pages
    posted = holding(dead.cache, [2])
    lent += posted.export().pages
    posted.mark_in_flight()
    slot = PageTable.num_bytes(1, PAGE_SIZE) // 2
    for offset in (20, slot + 20):
        dead.memory[9 * 2 * slot + offset] ^= 0xFF
    assert dead.table.read(9) == Torn()
    rebuilt = dead.rebuild()
    assert rebuilt.quarantined == [*lent, 9]
    assert rebuilt.num_torn == 1
    assert rebuilt.cache.num_available() == NUM_PAGES - 1 - 4
    again = dead.rebuild()
    assert again.quarantined == rebuilt.quarantined
    assert again.num_torn == 0
    again.cache.clear_quarantined(again.quarantined)
    assert again.cache.num_available() == NUM_PAGES - 1


def test_equal_pages_are_cached_once(dead: Dead) -> None:
    one, two = holding(dead.cache, [1] * 9), holding(dead.cache, [1] * 9)
    for sequence in (one, two):
        sequence.advance([1] * 8)
    rebuilt = dead.rebuild()
    assert rebuilt.cache.match([1] * 9).pages == one.pages[:2]
    assert len(rebuilt.recovered) == 2
    rebuilt.recovered.release()
    assert rebuilt.cache.num_available() == NUM_PAGES - 1


def test_private_pages_and_broken_chains_are_free(dead: Dead) -> None:
    hidden = holding(dead.cache, [7] * 9)
    dead.cache.reset()
    hidden.advance([7] * 9)
    running = dead.run([1] * 10)
    first, second, third = running.pages
    dead.table.write(second, replace(entry_of(dead.table, second), tokens=pack_tokens([9] * 4)))
    rebuilt = dead.rebuild()
    assert rebuilt.cache.match([7] * 9).num_tokens == 0
    assert rebuilt.cache.match([1] * 9).pages == [first]
    assert len(rebuilt.recovered) == 0
    for page in (second, third, *hidden.pages):
        found = entry_of(dead.table, page)
        assert found.state is PageState.FREE
        assert found.generation > 0


def test_a_running_full_page_that_nobody_cached_is_cached(dead: Dead) -> None:
    """Its scheduler died between two writes: the page is whole and its hash right."""
    sequence = dead.run([1] * 5)
    page = sequence.pages[0]
    dead.table.write(page, replace(entry_of(dead.table, page), state=PageState.RUNNING))
    rebuilt = dead.rebuild()
    assert rebuilt.cache.match([1] * 5).pages == [page]
    assert len(rebuilt.recovered) == 1
    assert entry_of(dead.table, page).state is PageState.CACHED


def test_a_rebuild_goes_through_the_free_list_as_often_for_many_pages_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each kind of page: page by page it took 26 s for 50,000 of them."""
    calls: list[int] = []
    adopt = PageAllocator.adopt

    def counted(self: PageAllocator, pages: Sequence[int], state: PageState) -> None:
        calls.append(len(pages))
        adopt(self, pages, state)

    monkeypatch.setattr(PageAllocator, "adopt", counted)
    dead = Dead()
    for first in range(3):
        dead.run([first] * 9).release()
    for first in range(10, 13):
        dead.run([first] * 7, num_filled=6)
    rebuilt = dead.rebuild()
    assert len(rebuilt.recovered) == 3
    assert sorted(calls) == [0, 3, 9], "quarantined, running, cached"


def test_a_rebuild_leaves_the_collector_as_it_was() -> None:
    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            Dead().rebuild()
            assert gc.isenabled() is is_enabled
        finally:
            gc.enable()
