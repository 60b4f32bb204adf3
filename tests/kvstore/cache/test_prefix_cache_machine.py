"""The prefix cache under everything a scheduler can do to it, killed now and then and rebuilt from its page table.

The oracle is the pool's content: what the tokens of each page would be. Whatever the cache offers must be exactly that.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvstore.cache.allocator import PageState
from kvstore.cache.block_table import BlockTable
from kvstore.cache.page_table import PageTable
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.rebuild import rebuild
from kvstore.hashing import chain_packed, root_hash, unpack_tokens
from kvstore.protocol import CacheCleared, CacheEvent, PagesStored
from tests.kvstore.cache.pages import drained, entry_of, make_table

PAGE_SIZE = 2
NUM_PAGES = 14
KEYS = ["", "salt"]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Running:
    """A sequence as its scheduler knows it."""

    def __init__(self, key: str, token_ids: list[int], pages: BlockTable, epoch: int = 0) -> None:
        self.epoch = epoch
        self.key = key
        self.token_ids = token_ids
        self.pages = pages


class CacheMachine(RuleBasedStateMachine):
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.table, memory = make_table(NUM_PAGES, PAGE_SIZE)
        self.reader = PageTable(memoryview(memory).toreadonly(), NUM_PAGES, PAGE_SIZE)
        self.epoch = 1
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE, group="g", epoch=1, table=self.table)
        # What the KV of each page was computed from: key, and all tokens up to the last one written.
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.quarantined: list[int] = []
        self.followed: set[bytes] = set()
        self.started: list[Running] = []
        self.generations: dict[int, int] = {}

    def alive(self, sequence: Running) -> bool:
        return sequence.epoch == self.epoch and not sequence.pages.is_released

    def write(self, sequence: Running, start: int, stop: int) -> None:
        """The worker's part: compute KV of positions start .. stop - 1 into their pages."""
        for position in range(start, stop):
            page = sequence.pages.pages[position // PAGE_SIZE]
            state = self.cache.blocks.allocator.state(page)
            assert state in (PageState.RUNNING, PageState.GRANTED, PageState.IN_FLIGHT), "shared pages are not written"
            self.content[page] = (sequence.key, tuple(sequence.token_ids[: position + 1]))

    def check_pages(self, sequence: Running) -> None:
        """Every token that counts as written has its KV where it should be."""
        pages = sequence.pages
        for index in range(-(-pages.num_tokens // PAGE_SIZE)):
            end = min(pages.num_tokens, (index + 1) * PAGE_SIZE)
            key, tokens = self.content[pages.pages[index]]
            assert key == sequence.key
            assert tokens[:end] == tuple(sequence.token_ids[:end])

    @rule(target=running, key=st.sampled_from(KEYS), token_ids=TOKENS)
    def start(self, key: str, token_ids: list[int]) -> Running:
        match = self.cache.match(token_ids, key)
        pages = self.cache.start(token_ids, key)
        assert pages.pages == match.pages
        assert pages.num_tokens == match.num_tokens < len(token_ids)
        sequence = Running(key, list(token_ids), pages, self.epoch)
        self.check_pages(sequence)
        self.started.append(sequence)
        return sequence

    @rule(sequence=running, extra=st.integers(0, 4))
    def reserve(self, sequence: Running, extra: int) -> None:
        if self.alive(sequence) and not sequence.pages.num_exported_pages:
            before = list(sequence.pages.pages)
            missing = sequence.pages.num_missing(len(sequence.token_ids) + extra)
            available = self.cache.num_available()
            fits = sequence.pages.reserve(len(sequence.token_ids) + extra)
            assert fits == (missing <= available)
            assert len(sequence.pages.pages) == len(before) + missing * fits
            for page, generation in zip(
                sequence.pages.pages[len(before) :], sequence.pages.generations(len(before)), strict=True
            ):
                assert generation > self.generations.get(page, 0)
                self.generations[page] = generation

    @rule(sequence=running, count=st.integers(1, 5))
    def advance(self, sequence: Running, count: int) -> None:
        if self.alive(sequence) and not sequence.pages.num_exported_pages:
            start = sequence.pages.num_tokens
            stop = min(start + count, len(sequence.token_ids), len(sequence.pages.pages) * PAGE_SIZE)
            if stop > start:
                self.write(sequence, start, stop)
                sequence.pages.advance(sequence.token_ids[start:stop])

    @rule(sequence=running, token_ids=TOKENS)
    def generate(self, sequence: Running, token_ids: list[int]) -> None:
        sequence.token_ids.extend(token_ids)

    @rule(sequence=running, is_posted=st.booleans(), count=st.integers(0, 12))
    def export(self, sequence: Running, is_posted: bool, count: int) -> None:
        if self.alive(sequence) and not sequence.pages.num_exported_pages:
            num_pages, num_missing = len(sequence.pages.pages), sequence.pages.num_missing(count)
            lent = sequence.pages.export(count)
            if lent is None:
                assert num_missing > self.cache.num_available()
                assert (len(sequence.pages.pages), sequence.pages.num_exported_pages) == (num_pages, 0)
                return
            assert len(sequence.pages.pages) == num_pages + num_missing
            assert {self.reader.read(page).state for page in lent.pages} <= {PageState.GRANTED}
            assert lent.generations == [self.reader.generation(page) for page in lent.pages]
        if self.alive(sequence) and is_posted:
            sequence.pages.mark_in_flight()

    @rule(sequence=running)
    def receive(self, sequence: Running) -> None:
        if self.alive(sequence) and sequence.pages.num_exported_pages:
            start = sequence.pages.num_tokens
            stop = min(len(sequence.token_ids), len(sequence.pages.pages) * PAGE_SIZE)
            self.write(sequence, start, max(start, stop))
            sequence.pages.commit(sequence.token_ids[start:stop])

    @rule(sequence=running, quiesced=st.booleans())
    def abort(self, sequence: Running, quiesced: bool) -> None:
        if self.alive(sequence):
            self.quarantined += sequence.pages.abort(quiesced=quiesced)

    @rule()
    def quiesce(self) -> None:
        self.cache.clear_quarantined(self.quarantined)
        self.quarantined = []

    @rule(target=running, sequence=consumes(running))
    def release(self, sequence: Running) -> object:
        if self.alive(sequence):
            self.quarantined += sequence.pages.release()
            assert sequence.pages.release() == []
        return multiple()

    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @rule(data=st.data())
    def scheduler_dies(self, data: st.DataObject) -> None:
        """A successor reads the table; it must not offer anything that is not in the pool, nor hand out lent pages."""
        lent = {page for page in range(1, NUM_PAGES) if self.is_lent(page)}
        cached = {page for node, _ in self.cache.blocks.tree.runs() for page in node.pages}
        self.epoch += 1
        rebuilt = rebuild(self.table, group="g", epoch=self.epoch)
        self.cache = rebuilt.cache
        self.followed = set()
        assert lent <= set(rebuilt.quarantined)
        assert rebuilt.num_torn == 0
        assert cached <= {page for node, _ in self.cache.blocks.tree.runs() for page in node.pages}
        self.quarantined = rebuilt.quarantined
        self.books_agree()
        wishes = [(key, [*tokens, 1]) for key, tokens in set(self.content.values())]
        for key, token_ids in [(data.draw(st.sampled_from(KEYS)), data.draw(TOKENS)), *wishes]:
            while (handle := rebuilt.recovered.claim(token_ids, key)) is not None:
                assert handle.num_tokens < len(token_ids)
                self.check_pages(Running(key, token_ids, handle))
                handle.release()
        self.books_agree()
        rebuilt.recovered.release()

    def is_lent(self, page: int) -> bool:
        return self.cache.blocks.allocator.state(page) in (
            PageState.GRANTED,
            PageState.IN_FLIGHT,
            PageState.QUARANTINED,
        )

    @invariant()
    def books_agree(self) -> None:
        cache = self.cache
        assert cache.check() == []
        assert cache.blocks.num_violations == 0
        assert sum(cache.num_pages_in(state) for state in PageState) == NUM_PAGES
        for page in range(1, NUM_PAGES):
            entry = entry_of(self.reader, page)
            state = cache.blocks.allocator.state(page)
            # To whoever reads the table a page is lent, posted or not.
            assert entry.state is (PageState.GRANTED if state is PageState.IN_FLIGHT else state)
            if entry.state is not PageState.FREE:
                assert entry.generation == cache.blocks.generation(page)

    @invariant()
    def cached_pages_hold_what_they_say(self) -> None:
        roots = {root_hash(key): key for key in KEYS}
        prefixes: dict[bytes, list[int]] = {root: [] for root in roots}
        keys = dict(roots)
        for node, parent_hash in self.cache.blocks.tree.runs():
            for page, hashed in zip(node.pages, node.hashes, strict=True):
                tokens = unpack_tokens(entry_of(self.reader, page).tokens)
                prefixes[hashed] = prefixes[parent_hash] + list(tokens)
                keys[hashed] = keys[parent_hash]
                assert self.content[page] == (keys[hashed], tuple(prefixes[hashed]))
                parent_hash = hashed

    @invariant()
    def followers_know_the_cache(self) -> None:
        for event in drained(self.cache):
            self.follow(event)
        hashes = {hashed for node, _ in self.cache.blocks.tree.runs() for hashed in node.hashes}
        assert self.followed == hashes

    def follow(self, event: CacheEvent) -> None:
        if isinstance(event, CacheCleared):
            self.followed.clear()
        elif isinstance(event, PagesStored):
            assert self.followed.isdisjoint(event.page_hashes)
            assert event.parent_hash in self.followed or event.parent_hash in map(root_hash, KEYS)
            assert event.page_hashes == chain_packed(event.parent_hash, event.tokens, PAGE_SIZE)
            self.followed.update(event.page_hashes)
        else:
            self.followed.difference_update(event.page_hashes)

    def teardown(self) -> None:
        """Nothing leaks: without handles every page is free or cached."""
        for sequence in self.started:
            if self.alive(sequence):
                self.quarantined += sequence.pages.release()
        self.cache.clear_quarantined(self.quarantined)
        assert self.cache.num_available() == NUM_PAGES - 1
        assert self.cache.num_sequences == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
