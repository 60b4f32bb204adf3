from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import pytest

from kvstore.cache.allocator import PageState, Violation
from kvstore.cache.events import MESSAGE_PAGES, EventLog
from kvstore.cache.page_table import PageEntry, PageTable
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.radix_tree import Node
from kvstore.errors import SequenceError
from kvstore.hashing import chain_hashes, pack_tokens, root_hash, unpack_tokens
from kvstore.protocol import CacheCleared, CacheEvents, PageRemoved, PagesStored
from mesh.errors import FrameRefused
from mesh.wire.codec import Codec
from tests.kvstore.cache.pages import PAGE_SIZE, drained, entry_of, holding, make_table


def make_cache(num_pages: int = 12, table: PageTable | None = None, epoch: int = 1) -> PrefixCache:
    return PrefixCache(num_pages, PAGE_SIZE, group="g", epoch=epoch, table=table)


def fill(cache: PrefixCache, token_ids: list[int], **options: str | bool) -> None:
    sequence = cache.start(token_ids, **options)  # type: ignore[arg-type]
    assert sequence.reserve(len(token_ids))
    sequence.advance(token_ids[sequence.num_tokens :])
    sequence.release()


@pytest.fixture
def table() -> PageTable:
    return make_table(12)[0]


@pytest.fixture
def cache(table: PageTable) -> Iterator[PrefixCache]:
    """Its books are right when a test has ended."""
    cache = make_cache(table=table)
    yield cache
    assert cache.check() == []


def test_a_prompt_is_found_again_but_never_all_of_it(cache: PrefixCache) -> None:
    prompt = list(range(100, 112))
    fill(cache, prompt)
    assert cache.match(prompt).num_tokens == 8
    assert cache.match([*prompt, 1]).num_tokens == 12
    assert cache.match(prompt[:5]).num_tokens == 4
    assert cache.match(prompt[:4]).num_tokens == 0
    assert cache.match([]).num_tokens == 0
    assert cache.match(prompt, "other key").num_tokens == 0
    assert len(cache.match(prompt).pages) == 2
    assert cache.num_sequences == 0


def test_full_pages_are_shared_while_their_sequence_runs(cache: PrefixCache) -> None:
    first = holding(cache, [1, 2, 3, 4, 5], 6)
    first.advance([1, 2, 3])
    assert cache.match([1, 2, 3, 4, 5]).num_tokens == 0
    first.advance([4])
    second = cache.start([1, 2, 3, 4, 9])
    assert second.num_cached_tokens == second.num_tokens == 4
    assert second.pages == first.pages[:1]
    first.release()
    assert cache.num_available() == 10, "the second one holds the shared page"
    second.release()
    assert cache.num_available() == 11


def test_the_same_prompt_twice_at_once_is_never_owned_twice(cache: PrefixCache) -> None:
    prompt = list(range(9))
    one, two = holding(cache, prompt), holding(cache, prompt)
    for start in (0, 4):
        one.advance(prompt[start : start + 4])
        two.advance(prompt[start : start + 4])
    assert not set(one.pages) & set(two.pages)
    assert cache.check() == []
    two.advance([8, 20, 21, 22])
    assert cache.match([*prompt, 20, 21, 22, 0]).pages == [*one.pages[:2], two.pages[2]]
    two.release()
    assert cache.num_pages_in(PageState.CACHED) == 3
    one.release()
    assert cache.num_available() == 11


def test_reserve_is_all_or_nothing_and_evicts_what_nobody_holds() -> None:
    cache = make_cache(num_pages=6)
    fill(cache, list(range(12)))
    drained(cache)
    sequence = cache.start([50] * 12)
    assert sequence.num_missing(12) == 3
    assert not sequence.reserve(21)
    assert sequence.pages == []
    assert sequence.reserve(20)
    assert sequence.reserve(3), "already covered"
    assert len(set(sequence.pages)) == 5
    assert cache.num_available() == 0
    assert cache.blocks.num_evicted_pages == 3
    assert not cache.start([1] * 4).reserve(1)
    removed = drained(cache)
    chain = chain_hashes(root_hash(), list(range(12)), PAGE_SIZE)
    assert removed == [PageRemoved(group="g", page_hashes=chain[::-1])]


def test_a_handle_checks_its_own_use(cache: PrefixCache) -> None:
    sequence = cache.start([1, 2, 3])
    with pytest.raises(SequenceError, match="the reserved pages have room for 0"):
        sequence.advance([1])
    sequence.reserve(3)
    with pytest.raises(ValueError, match="token ids"):
        sequence.advance([-1])
    assert sequence.num_tokens == 0
    sequence.advance([1, 2, 3])
    sequence.release()
    assert sequence.release() == []
    for use in (lambda: sequence.reserve(9), lambda: sequence.advance([1]), sequence.export):
        with pytest.raises(SequenceError, match="already been released"):
            use()


def test_lent_pages_come_back_with_their_tokens(cache: PrefixCache, table: PageTable) -> None:
    prompt = list(range(10))
    fill(cache, [*prompt[:4], 77])
    sequence = cache.start(prompt)
    assert sequence.num_cached_tokens == 4
    assert sequence.reserve(10)
    lent = sequence.export()
    assert (lent.first, lent.pages) == (1, sequence.pages[1:])
    assert lent.generations == sequence.generations(1) == [table.generation(page) for page in lent.pages]
    assert cache.num_pages_in(PageState.GRANTED) == sequence.num_exported_pages == 2
    assert cache.check() == []
    with pytest.raises(SequenceError, match="exported"):
        sequence.export()
    with pytest.raises(SequenceError, match="exported"):
        sequence.reserve(100)
    with pytest.raises(SequenceError, match="have room for 0"):
        sequence.advance([1])
    for _ in range(2):
        sequence.mark_in_flight()
        assert cache.num_pages_in(PageState.IN_FLIGHT) == 2
    assert cache.check() == []
    with pytest.raises(SequenceError, match="9 tokens do not fit"):
        sequence.commit([0] * 9)
    sequence.commit(prompt[4:])
    assert (sequence.num_tokens, len(sequence.page_hashes), sequence.num_exported_pages) == (10, 2, 0)
    assert cache.match([*prompt, 1]).num_tokens == 8
    assert cache.check() == []
    sequence.release()
    assert cache.num_available() == 11


def test_an_entry_is_written_when_its_page_is_lent_and_when_it_is_back(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, PageState]] = []
    put = PageTable._put

    def counted(self: PageTable, page: int, checked: bytes) -> None:
        put(self, page, checked)
        written.append((page, entry_of(self, page).state))

    monkeypatch.setattr(PageTable, "_put", counted)
    sequence = cache.start(list(range(8)))
    assert sequence.export(100) is None
    assert not written
    lent = sequence.export(8)
    sequence.mark_in_flight()
    sequence.commit(list(range(8)))
    assert written == [(page, state) for state in (PageState.GRANTED, PageState.CACHED) for page in lent.pages]
    sequence.release()


def test_the_first_lent_pages_can_come_back_alone(cache: PrefixCache) -> None:
    prompt = list(range(10))
    sequence = holding(cache, prompt, 10)
    lent = sequence.export().pages
    sequence.mark_in_flight()
    with pytest.raises(SequenceError, match="do not fill whole pages"):
        sequence.commit_first(prompt[:3])
    sequence.commit_first(prompt[:4])
    assert cache.match(prompt).pages == lent[:1]
    assert cache.check() == []
    assert sequence.abort(quiesced=False) == lent[1:]
    sequence.release()
    cache.clear_quarantined(lent[1:])
    assert cache.match(prompt).num_tokens == 4
    assert cache.num_available() == 11


def test_lending_gives_up_a_partly_filled_page(cache: PrefixCache) -> None:
    sequence = holding(cache, [1] * 9, 9)
    sequence.advance([1] * 6)
    assert sequence.export().first == 1
    assert sequence.num_tokens == 4
    sequence.commit([1] * 5)
    assert sequence.num_tokens == 9
    sequence.release()


def test_the_table_says_what_the_books_say() -> None:
    table, _ = make_table(8)
    cache = make_cache(8, table, epoch=3)
    sequence = holding(cache, [5] * 6, 12, "salt")
    root = root_hash("salt")
    first, second, third = sequence.pages
    generations = sequence.generations()
    assert table.read(first) == PageEntry(PageState.RUNNING, generations[0], 3, parent_hash=root, is_first=True)
    assert table.read(third) == PageEntry(PageState.RUNNING, generations[2], 3)
    sequence.advance([5] * 6)
    hashes = chain_hashes(root, [5] * 6, PAGE_SIZE)
    assert list(sequence.page_hashes) == hashes
    stored = entry_of(table, first)
    assert (stored.state, stored.page_hash, stored.parent_hash, unpack_tokens(stored.tokens)) == (
        PageState.CACHED,
        hashes[0],
        root,
        (5, 5, 5, 5),
    )
    tail = entry_of(table, second)
    assert (tail.state, tail.parent_hash, unpack_tokens(tail.tokens)) == (PageState.RUNNING, hashes[0], (5, 5))
    sequence.release()
    assert [entry_of(table, page).state for page in range(1, 8)] == [PageState.CACHED, *[PageState.FREE] * 6]


def test_reset_forgets_prefixes_and_lets_running_sequences_finish_alone(cache: PrefixCache) -> None:
    fill(cache, [9] * 9)
    running = holding(cache, [1] * 9, 9)
    running.advance([1] * 4)
    twin = cache.start([1] * 9)
    drained(cache)
    cache.reset()
    assert drained(cache) == [CacheCleared(group="g")]
    assert cache.match([1] * 9).num_tokens == cache.match([9] * 9).num_tokens == 0
    assert cache.num_available() == 8
    running.advance([1] * 5)
    assert cache.match([1] * 9).num_tokens == 0
    assert drained(cache) == []
    assert cache.check() == []
    running.release()
    assert cache.num_available() == 10
    fill(cache, [1] * 9)
    assert cache.match([1] * 9).num_tokens == 8
    twin.release()
    assert cache.num_available() == 11


def test_a_page_in_two_books_is_quarantined_and_serving_goes_on(cache: PrefixCache) -> None:
    fill(cache, [3] * 8)
    one = holding(cache, [1] * 5)
    stolen = one.pages[0]
    cache.blocks.allocator.release([stolen])
    two = holding(cache, [2] * 5)
    assert stolen in two.pages
    assert {violation.page for violation in cache.check()} == {stolen}
    assert cache.blocks.num_violations == 1
    one.advance([1] * 5)
    one.release()
    two.release()
    assert cache.num_pages_in(PageState.QUARANTINED) == 1
    assert cache.match([1] * 5).num_tokens == 0


def test_a_doubtful_cached_page_clears_the_cache(cache: PrefixCache) -> None:
    fill(cache, [3] * 9)
    page = cache.match([3] * 9).pages[0]
    cache.blocks.allocator.evict([page])
    assert {violation.page for violation in cache.check()} == {page}
    assert cache.match([3] * 9).num_tokens == 0
    assert cache.check() == []
    assert cache.num_available() == 10
    assert all(isinstance(violation, Violation) for violation in cache.blocks.violations)


def test_a_page_freed_behind_its_sequence_is_not_published(cache: PrefixCache) -> None:
    sequence = holding(cache, [1] * 9, 9)
    cache.blocks.allocator.release([sequence.pages[0]])
    sequence.advance([1] * 9)
    assert cache.blocks.num_violations == 1
    assert cache.match([1] * 9).num_tokens == 0
    assert drained(cache) == [CacheCleared(group="g")], "nobody is told of the other page, which nobody finds"
    sequence.release()
    assert cache.num_pages_in(PageState.QUARANTINED) == 1
    assert cache.num_available() == 10


def test_an_eviction_that_the_books_refuse_is_only_too_few_pages() -> None:
    cache = make_cache(num_pages=3)
    fill(cache, [3] * 8)
    cache.blocks.allocator.quarantine(cache.match([3] * 8).pages)
    sequence = cache.start([1] * 8)
    assert not sequence.reserve(8)
    assert cache.blocks.num_violations == 1
    assert not sequence.reserve(8)
    assert sequence.reserve(4)
    sequence.release()
    assert cache.check() == []


def test_a_move_of_pages_outside_the_pool_is_only_reported(cache: PrefixCache) -> None:
    cache.clear_quarantined([99, 0, 3])
    assert cache.blocks.num_violations == 3
    assert cache.num_pages_in(PageState.QUARANTINED) == 1


def test_events_tell_what_the_cache_holds(cache: PrefixCache) -> None:
    fill(cache, list(range(9)), extra_key="k")
    hashes = chain_hashes(root_hash("k"), list(range(9)), PAGE_SIZE)
    message = cache.events.drain_message()
    assert isinstance(message, CacheEvents)
    run = {"group": "g", "page_hashes": hashes, "parent_hash": root_hash("k"), "tokens": pack_tokens(range(8))}
    assert message.events == [CacheCleared(group="g"), PagesStored(**run, extra_key="k")]
    assert cache.events.drain_message() is None
    cache.events.restate()
    assert drained(cache) == [CacheCleared(group="g"), PagesStored(**run)]
    fill(cache, [0, 1, 2, 3, 9, 9, 9, 9, 9], extra_key="k")
    [event] = drained(cache)
    assert isinstance(event, PagesStored)
    assert (event.parent_hash, event.tokens) == (hashes[0], pack_tokens([9] * 4)), "only what was not cached before"
    assert (cache.num_query_tokens, cache.num_hit_tokens, cache.num_pages) == (18, 4, 11)


def test_an_event_log_that_nobody_drains_restates_itself() -> None:
    node = Node(b"0", None, pack_tokens([1]), [1], [b"1"])
    log = EventLog(lambda: [(node, b"0")], "g", limit=2)
    for number in range(4):
        log.removed([bytes([number])] * MESSAGE_PAGES)
    log.removed([])
    log.stored(pack_tokens([4, 5]), [b"2"], b"1", "")
    kept = PagesStored(group="g", page_hashes=[b"1"], parent_hash=b"0", tokens=pack_tokens([1]))
    assert log.drain_message() == CacheEvents(events=[CacheCleared(group="g"), kept])
    assert not log.has_news
    log.stored(pack_tokens([4, 5]), [b"2"], b"1", "")
    log.cleared()
    assert log.drain_message() == CacheEvents(events=[CacheCleared(group="g")])


def test_a_message_has_so_many_pages_at_most_and_a_longer_run_comes_in_parts() -> None:
    num_pages = 2 * MESSAGE_PAGES + 1
    tokens, hashes = pack_tokens(range(2 * num_pages)), [bytes([0, *number.to_bytes(2)]) for number in range(num_pages)]
    log = EventLog(list, "g")
    log.stored(tokens, hashes, b"root", "k")
    log.removed(hashes)
    log.stored(tokens[:8], hashes[:1], b"root", "k")
    messages = [message.events for message in iter(log.drain_message, None)]
    numbers = [[len(event.page_hashes) for event in events] for events in messages]
    assert numbers == [[MESSAGE_PAGES], [MESSAGE_PAGES], [1], [MESSAGE_PAGES], [MESSAGE_PAGES], [1, 1]]
    runs = [event for events in messages[:3] for event in events]
    assert b"".join(run.tokens for run in runs) == tokens
    assert [run.parent_hash for run in runs] == [b"root", hashes[MESSAGE_PAGES - 1], hashes[2 * MESSAGE_PAGES - 1]]
    assert [one for event in runs for one in event.page_hashes] == hashes


def test_a_run_that_does_not_fit_its_pages_is_refused() -> None:
    run = {"type": "PagesStored", "group": "g", "page_hashes": [b"a" * 16] * 2, "parent_hash": b"p" * 16}
    wrong: list[dict[str, object]] = [
        {"tokens": bytes(12)}, {"tokens": b""}, {"page_hashes": []}, {"page_hashes": [b"a" * 16, b"short"]},
        {"parent_hash": bytes(17)}, {"tokens": [1, 2]},
    ]  # fmt: skip
    for fields in ({}, *wrong):
        body = msgspec.msgpack.encode({"type": "CacheEvents", "events": [{**run, "tokens": bytes(16), **fields}]})
        with nullcontext() if fields == {} else pytest.raises(FrameRefused, match="bad_body"):
            assert Codec(CacheEvents).decode(body).events[0].tokens == bytes(16)
