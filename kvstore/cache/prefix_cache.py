"""A scheduler's view of its pool: find cached prefixes, hold pages for running sequences, share what they compute.

    match = cache.match(token_ids)              # how much is cached; holds nothing
    sequence = cache.start(token_ids)           # locks the cached prefix
    sequence.reserve(len(token_ids))            # allocates the rest, evicting what nobody holds; False: not enough
    sequence.advance(token_ids[a:b])            # after a step was acknowledged: commits, shares full pages at once
    sequence.release()                          # once, however it ended

Pure: no clock, no I/O except the page table's memory. Owned by one scheduler, the only writer of the pool's page table.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstore.cache.allocator import PAGES_AT_ONCE, PageAllocator, PageState, Slices, Violation, whole
from kvstore.cache.block_pool import BlockPool
from kvstore.cache.block_table import BlockTable
from kvstore.cache.eviction import EvictionPolicy
from kvstore.cache.page_table import PageTable, TableScan
from kvstore.cache.radix_tree import Node, RadixTree, TreeMatch
from kvstore.hashing import chain_hashes, pack_tokens, root_hash
from kvstore.layout import PADDING_PAGE


class PrefixMatch(NamedTuple):
    """The cached part of a prompt: whole pages, never all of its tokens. It does not hold them; `start` does."""

    pages: list[int]
    num_tokens: int
    found: TreeMatch


class PrefixCache:
    """Prefix cache, allocator and page table of one worker group's pool, kept in step. Starts empty.

    `blocks` are the books themselves, for `rebuild`, which has scanned `table` already (`found`); `events` logs what
    entered and left the cache; `on_reused` is called with a sequence that starts with cached pages, and their root.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        group: str,
        epoch: int,
        table: PageTable | None = None,
        policy: EvictionPolicy | None = None,
        found: TableScan | None = None,
    ) -> None:
        tree = RadixTree(page_size, policy)
        self.blocks = BlockPool(PageAllocator(num_pages), tree, table, group=group, epoch=epoch, found=found)
        self.events = self.blocks.log
        self._live: dict[int, BlockTable] = {}
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.on_reused: Callable[[BlockTable, bytes], None] | None = None
        self.page_size = page_size
        self.events.cleared()

    @property
    def num_sequences(self) -> int:
        return len(self._live)

    @property
    def num_pages(self) -> int:
        """Pages that sequences can use: all but the padding page."""
        return self.blocks.allocator.num_pages - 1

    def num_available(self) -> int:
        """Pages available to new reservations: free ones, and cached ones that nobody holds."""
        return self.blocks.num_available()

    def num_pages_in(self, state: PageState) -> int:
        return self.blocks.allocator.count(state)

    def match(self, token_ids: Sequence[int], extra_key: str = "") -> PrefixMatch:
        """The cached prefix of a prompt without its last token, which must be computed for its logits."""
        found = self._find(token_ids, extra_key)
        return PrefixMatch(found.pages, len(found.pages) * self.page_size, found)

    def uncached(self, token_ids: Sequence[int], extra_key: str = "") -> tuple[int, list[bytes]]:
        """How many pages of a prompt are cached, and the hashes of its other full pages, as far as `match` looks."""
        found = self._find(token_ids, extra_key)
        num_cached, usable = len(found.pages), max(0, (len(token_ids) - 1) // self.page_size)
        left = token_ids[num_cached * self.page_size : usable * self.page_size]
        return num_cached, chain_hashes(found.last_hash, left, self.page_size)

    def start(
        self,
        token_ids: Sequence[int],
        extra_key: str = "",
        *,
        match: PrefixMatch | None = None,
        is_counted: bool = True,
    ) -> BlockTable:
        """Hold the cached prefix; `is_counted`: as one query of the cache, and as hits.

        `match`: what `match` has found for the same, since when nothing has entered or left the cache.
        """
        found = self._find(token_ids, extra_key) if match is None else match.found
        if is_counted:
            self.num_query_tokens += len(token_ids)
            self.num_hit_tokens += len(found.pages) * self.page_size
        sequence = self._hold(self.blocks.tree.lock(found), found.pages, extra_key)
        if self.on_reused is not None and found.pages:
            self.on_reused(sequence, found.root)
        return sequence

    def clear_quarantined(self, pages: Sequence[int]) -> None:
        """Free pages that nothing can write any more (the agent answered `GrantClosed`)."""
        cleared = self.blocks.move(self.blocks.allocator.clear, pages)
        self.blocks.write_states(cleared, PageState.FREE)

    def reset(self) -> None:
        """Forget every cached prefix; running sequences keep their pages but no longer share them."""
        self.blocks.clear_tree()

    def check(self) -> list[Violation]:
        """Compare all books; quarantine pages they disagree about. Linear in the pool: see `checking`."""
        return whole(self.checking())

    def checking(self) -> Slices[list[Violation]]:
        """As `check`, in slices; to be given up if anything happens to the cache before it ends.

        What is found is contained at once, which takes as long as clearing the cache.
        """
        # A byte for each page, not a set: one of a million pages takes 30 ms to grow.
        claimed = bytearray(self.blocks.allocator.num_pages)
        claimed[PADDING_PAGE] = PageState.RESERVED
        doubles: list[Violation] = []
        for number, (page, state, is_shared) in enumerate(self._claims(), 1):
            if not PADDING_PAGE < page < len(claimed):
                doubles.append(Violation(page, f"{state.name}, by its holder", "a page of the pool"))
            elif not claimed[page] or (is_shared and claimed[page] == state):
                claimed[page] = state
            else:
                doubles.append(Violation(page, f"another holder's, {PageState(claimed[page]).name}", state.name))
            if number % PAGES_AT_ONCE == 0:
                yield
        violations = doubles + (yield from self.blocks.allocator.checking(claimed))
        if violations:
            self._contain(violations)
        return violations

    def resume(self, node: Node, pages: list[int], tail_page: int, tail_tokens: bytes) -> BlockTable:
        """A handle on the pages left by an earlier scheduler's sequence; `node` is locked. Called by `rebuild` only."""
        sequence = self._hold(node, pages, "")
        sequence.adopt_tail(tail_page, tail_tokens)
        return sequence

    # inside

    def _find(self, token_ids: Sequence[int], extra_key: str) -> TreeMatch:
        # One token less than there are: with all of them cached there would be no logits to sample the next one from.
        usable = max(0, (len(token_ids) - 1) // self.page_size * self.page_size)
        # The same call as in `nodes/tokenizer/routing/core.py`: with another root there, no prompt is sent to what is
        # here.
        return self.blocks.tree.match_prefix(root_hash(extra_key), pack_tokens(token_ids[:usable]))

    def _hold(self, node: Node, pages: list[int], extra_key: str) -> BlockTable:
        hashes: list[bytes] = []
        step: Node | None = node
        while step is not None:
            hashes[:0] = step.hashes
            step = step.parent
        sequence = BlockTable(self.blocks, node, pages, hashes, extra_key=extra_key, on_release=self._forget)
        # By identity: two handles of equal content are two holders. `release` removes the entry, so no id occurs twice.
        self._live[id(sequence)] = sequence
        return sequence

    def _forget(self, sequence: BlockTable) -> None:
        del self._live[id(sequence)]

    def _claims(self) -> Iterator[tuple[int, PageState, bool]]:
        """What the holders of pages believe, and whether they may share the page with a holder named before.

        A page has one place in the tree, but many sequences may hold it there; in other states it has one holder.
        """
        for node, _ in self.blocks.tree.runs():
            for page in node.pages:
                yield page, PageState.CACHED, False
        for sequence in self._live.values():
            for page, state in sequence.claims():
                yield page, state, state is PageState.CACHED

    def _contain(self, violations: list[Violation]) -> None:
        """Quarantine pages in doubt; a cached one may hold another prompt's KV, so the cache then starts over."""
        allocator = self.blocks.allocator
        doubtful = {violation.page for violation in violations}
        self.blocks.report(violations)
        is_cached = any(page in doubtful for node, _ in self.blocks.tree.runs() for page in node.pages)
        inside = sorted(page for page in doubtful if PADDING_PAGE < page < allocator.num_pages)
        loose = [page for page in inside if allocator.state(page) is not PageState.QUARANTINED]
        self.blocks.move(allocator.quarantine, loose)
        self.blocks.write_states(inside, PageState.QUARANTINED)
        # All prefixes, not this one alone: with the books wrong, it is unknown which of the others are right.
        if is_cached:
            self.reset()
