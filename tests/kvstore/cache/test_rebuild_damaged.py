"""A page table that was damaged, or written by others: the cache that is made of it is smaller, never wrong."""

import dataclasses
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cache.allocator import PageState
from kvstore.cache.block_table import BlockTable
from kvstore.cache.page_table import MAX_GENERATION, PLAUSIBLE_GENERATIONS, PageEntry, PageTable
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.rebuild import Rebuilt, rebuild
from kvstore.hashing import HASH_BYTES, NO_HASH, pack_tokens, page_hash, root_hash
from tests.kvstore.cache.pages import PAGE_SIZE, entry_of, holding, make_table

NUM_PAGES = 14
TABLE_BYTES = PageTable.num_bytes(NUM_PAGES, PAGE_SIZE)


@dataclasses.dataclass
class Pool:
    """A page table, and what the pages beside it hold: for each position of a page the tokens up to there.

    That is what KV depends on, so whoever finds a page by other tokens would compute on the wrong KV.
    """

    memory: bytearray = dataclasses.field(default_factory=lambda: bytearray(TABLE_BYTES))
    pages: dict[int, list[tuple[int, ...]]] = dataclasses.field(
        default_factory=lambda: {page: [()] * PAGE_SIZE for page in range(NUM_PAGES)}
    )
    prompts: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def table(self) -> PageTable:
        return PageTable(memoryview(self.memory), NUM_PAGES, PAGE_SIZE)

    def cache(self) -> PrefixCache:
        return PrefixCache(NUM_PAGES, PAGE_SIZE, group="g", epoch=1, table=self.table)

    def run(self, cache: PrefixCache, prompt: list[int]) -> BlockTable:
        """Compute a prompt into pages, a token at a time, as a worker does before the scheduler writes it down."""
        self.prompts.append(prompt)
        sequence = holding(cache, prompt)
        for at in range(sequence.num_tokens, len(prompt)):
            self.pages[sequence.pages[at // PAGE_SIZE]][at % PAGE_SIZE] = tuple(prompt[: at + 1])
            sequence.advance([prompt[at]])
        return sequence

    def rebuild(self, epoch: int = 2) -> Rebuilt:
        """A successor's books, all of them right and all pages accounted for."""
        found = rebuild(self.table, group="g", epoch=epoch)
        assert found.cache.check() == []
        found.cache.clear_quarantined(found.quarantined)
        self.check(found)
        return found

    def check(self, found: Rebuilt) -> None:
        """What can be found by any prompt was computed of that prompt; nothing is held once all are let go."""
        for prompt in self.prompts:
            match = found.cache.match([*prompt, 0])
            self.check_pages([*prompt, 0], match.pages, match.num_tokens)
            while (sequence := found.recovered.claim([*prompt, 0])) is not None:
                self.check_pages([*prompt, 0], sequence.pages, sequence.num_tokens)
                sequence.release()
        found.recovered.release()
        assert found.cache.num_available() == NUM_PAGES - 1
        assert found.cache.check() == []
        for page, entry in self.table.scan():
            assert page == 0 or isinstance(entry, PageEntry), "what was torn is written anew"
        # All pages can be used.
        holding(found.cache, [900, 901], (NUM_PAGES - 1) * PAGE_SIZE).release()

    def check_pages(self, tokens: list[int], pages: list[int], num_tokens: int) -> None:
        for at in range(num_tokens):
            assert self.pages[pages[at // PAGE_SIZE]][at % PAGE_SIZE] == tuple(tokens[: at + 1])


def lived(seed: int) -> Pool:
    """A pool after a life of many requests: pages were evicted and used again, some sequences still run."""
    dice, pool = random.Random(seed), Pool()
    cache = pool.cache()
    running: list[BlockTable] = []
    for _ in range(dice.randrange(1, 14)):
        start = dice.choice([[1] * 4, [1] * 8, [2] * 4, []])
        running.append(pool.run(cache, start + [dice.randrange(1, 5) for _ in range(dice.randrange(1, 18))]))
        # Room for the longest prompt, of 26 tokens.
        while len(running) > 2 or (running and cache.num_available() < 7):
            running.pop(dice.randrange(len(running))).release()
    return pool


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_the_pools_of_these_tests_are_sound(seed: int) -> None:
    found = lived(seed).rebuild()
    assert (found.num_torn, found.num_dropped) == (0, 0)


@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_region_may_be_damaged(seed: int, data: st.DataObject) -> None:
    pool = lived(seed)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, TABLE_BYTES - 1))
        length = min(data.draw(st.sampled_from([1, 2, 8, 64, 80, 160, 500])), TABLE_BYTES - at)
        kind = data.draw(st.sampled_from(["zeros", "ones", "noise", "bit", "other slot"]))
        if kind == "bit":
            pool.memory[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "other slot":
            source = data.draw(st.integers(0, TABLE_BYTES - length))
            pool.memory[at : at + length] = pool.memory[source : source + length]
        else:
            noise = random.Random(data.draw(st.integers(0, 2**32))).randbytes(length)
            pool.memory[at : at + length] = {"zeros": bytes(length), "ones": b"\xff" * length, "noise": noise}[kind]
    pool.rebuild()


HASHES = st.one_of(
    st.just(NO_HASH),
    st.just(root_hash()),
    st.sampled_from([page_hash(root_hash(), pack_tokens([1] * 4)), page_hash(root_hash(), pack_tokens([2] * 4))]),
    st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES),
)
FOREIGN = st.builds(
    PageEntry,
    state=st.sampled_from(PageState),
    generation=st.one_of(st.integers(0, 40), st.integers(PLAUSIBLE_GENERATIONS + 1, MAX_GENERATION)),
    # Another scheduler's: from before, and from later.
    owner_epoch=st.integers(0, 2**64 - 1),
    page_hash=HASHES,
    parent_hash=HASHES,
    tokens=st.lists(st.sampled_from([1, 2, 2**32 - 1]), max_size=PAGE_SIZE).map(pack_tokens),
    is_first=st.booleans(),
    is_private=st.booleans(),
)


@given(seed=st.integers(0, 10_000), entries=st.dictionaries(st.integers(0, NUM_PAGES - 1), FOREIGN, min_size=1))
@settings(max_examples=120, deadline=None)
def test_entries_that_others_wrote_never_keep_a_scheduler_from_starting(
    seed: int, entries: dict[int, PageEntry]
) -> None:
    """Whole, with right sums, and any nonsense in them. What they say of KV cannot be checked, but books can."""
    pool = lived(seed)
    for page, entry in entries.items():
        pool.table.write(page, entry)
    found = rebuild(pool.table, group="g", epoch=2)
    assert found.cache.check() == []
    found.cache.clear_quarantined(found.quarantined)
    found.recovered.release()
    assert found.cache.check() == []
    assert found.cache.num_available() == NUM_PAGES - 1
    holding(found.cache, [900], (NUM_PAGES - 1) * PAGE_SIZE).release()
    again = rebuild(pool.table, group="g", epoch=3)
    assert (again.num_torn, again.num_dropped, len(again.recovered)) == (0, 0, 0), "what is dropped is written anew"


def change(pool: Pool, page: int, **fields: object) -> None:
    pool.table.write(page, msgspec.structs.replace(entry_of(pool.table, page), **fields))


def chain(length: int = 13) -> tuple[Pool, list[int]]:
    """A prompt in pages, ended; its full pages are cached."""
    pool = Pool()
    sequence = pool.run(pool.cache(), list(range(1, 1 + length)))
    pages = list(sequence.pages)
    sequence.release()
    return pool, pages


def first_look(pool: Pool) -> tuple[int, int, int]:
    """Torn and dropped entries, and the pages found of the first prompt; all else is as it should be, too."""
    found = rebuild(pool.table, group="g", epoch=2)
    num_found = len(found.cache.match([*pool.prompts[0], 0]).pages)
    found.cache.clear_quarantined(found.quarantined)
    pool.check(found)
    return found.num_torn, found.num_dropped, num_found


DAMAGES = {
    "owner_epoch of a later scheduler": {"owner_epoch": 3},
    "generation of the future": {"generation": PLAUSIBLE_GENERATIONS + 1},
    "other tokens": {"tokens": pack_tokens([9] * 4)},
    "fewer tokens": {"tokens": pack_tokens([5, 6])},
    "another hash": {"page_hash": b"x" * 16},
    "a parent that is nowhere": {"parent_hash": b"x" * 16},
    "no hash": {"page_hash": NO_HASH},
    "reserved": {"state": PageState.RESERVED},
    "private": {"is_private": True},
}


@pytest.mark.parametrize("fields", DAMAGES.values(), ids=DAMAGES)
def test_an_entry_that_cannot_be_true_is_dropped_with_what_hangs_on_it(fields: dict[str, object]) -> None:
    pool, pages = chain()
    assert first_look(chain()[0]) == (0, 0, 3)
    change(pool, pages[1], **fields)
    assert first_look(pool) == (0, 2, 1)
    assert {entry_of(pool.table, page).state for page in pages} == {PageState.FREE}


def test_parents_in_a_circle_are_dropped() -> None:
    pool, (one, two, three, _) = chain()
    hashes = [entry_of(pool.table, page).page_hash for page in (one, two, three)]
    for page, parent in ((one, hashes[2]), (two, hashes[0]), (three, hashes[1])):
        change(pool, page, parent_hash=parent, is_first=False)
    assert first_look(pool) == (0, 3, 0)


def test_a_page_that_is_its_own_parent_is_dropped() -> None:
    pool, pages = chain()
    change(pool, pages[1], parent_hash=entry_of(pool.table, pages[1]).page_hash)
    assert first_look(pool) == (0, 2, 1)


def test_a_parent_that_is_free_takes_its_children_along() -> None:
    pool, pages = chain()
    pool.table.write(pages[0], PageEntry(generation=9))
    assert first_look(pool) == (0, 2, 0)


def test_of_two_pages_that_claim_one_hash_one_is_found() -> None:
    pool, pages = chain()
    twin = 11
    assert twin not in pages
    pool.table.write(twin, entry_of(pool.table, pages[1]))
    found = rebuild(pool.table, group="g", epoch=2)
    # No sequence shares what it does not hold, so the second one is damage.
    assert found.num_dropped == 1
    assert found.cache.match([*pool.prompts[0], 0]).pages == pages[:3]
    assert entry_of(pool.table, twin).state is PageState.FREE
    pool.check(found)


def test_a_page_in_the_middle_that_says_it_is_the_first_is_in_no_two_chains() -> None:
    pool, pages = chain()
    change(pool, pages[1], is_first=True)
    assert first_look(pool)[2] == 1


def test_the_tail_of_a_sequence_whose_prefix_contradicts_it_is_not_claimed() -> None:
    """Otherwise its tokens would be found behind another prefix."""
    pool = Pool()
    sequence = pool.run(pool.cache(), list(range(1, 12)))
    change(pool, sequence.pages[1], is_first=True)
    change(pool, sequence.pages[2], is_first=True)
    found = rebuild(pool.table, group="g", epoch=2)
    for prefix in ([], [1, 2, 3, 4]):
        assert found.recovered.claim([*prefix, 9, 10, 11, 12]) is None
    assert found.cache.check() == []


def test_what_a_page_held_before_is_not_found_when_its_newest_entry_is_lost() -> None:
    """The older entry is whole and its hash is right, but the page holds another prompt by now."""
    pool = Pool()
    cache = pool.cache()
    old = pool.run(cache, [1] * 5)
    page = old.pages[0]
    old.release()
    # All pages are taken, the old prompt's last; the new one's first page was just computed.
    new = holding(cache, [2] * 5, (NUM_PAGES - 1) * PAGE_SIZE)
    assert page in new.pages
    pool.pages[page] = [(2,) * (at + 1) for at in range(PAGE_SIZE)]
    slot_bytes = PageTable.num_bytes(1, PAGE_SIZE) // 2
    slots = [2 * page * slot_bytes + index * slot_bytes for index in range(2)]
    newest = max(slots, key=lambda at: pool.memory[at : at + 6][::-1])
    pool.memory[newest + 20] ^= 0xFF
    assert first_look(pool) == (1, 0, 0)


@pytest.mark.parametrize("filling", [0x00, 0xFF, 0xA5])
def test_a_table_of_one_byte(filling: int) -> None:
    pool, _ = chain()
    pool.memory[:] = bytes([filling]) * TABLE_BYTES
    found = rebuild(pool.table, group="g", epoch=2)
    assert found.num_torn == (NUM_PAGES - 1 if filling else 0)
    assert len(found.quarantined) == found.num_torn
    pool.memory[:] = bytes([filling]) * TABLE_BYTES
    pool.rebuild()


def test_the_table_of_another_pool_says_nothing_of_this_one() -> None:
    """Of another page size: what lies where is another's, so nothing is whole."""
    pool, _ = chain()
    other, memory = make_table(NUM_PAGES, 3 * PAGE_SIZE)
    cache = PrefixCache(NUM_PAGES, 3 * PAGE_SIZE, group="g", epoch=1, table=other)
    holding(cache, [1] * 30).advance([1] * 30)
    pool.memory[:] = memory[:TABLE_BYTES]
    assert first_look(pool)[2] == 0


def test_generations_go_on_from_what_can_be_believed() -> None:
    pool, pages = chain()
    change(pool, pages[1], generation=MAX_GENERATION)
    before = entry_of(pool.table, pages[2]).generation
    found = rebuild(pool.table, group="g", epoch=2)
    sequence = holding(found.cache, [900], 5 * PAGE_SIZE)
    assert all(before < generation < before + 1000 for generation in sequence.generations())
