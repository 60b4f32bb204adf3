"""The books of one pool, kept together: allocator, radix tree, page table, event log.

Every change of a page's owner goes through here, so that the allocator's state, the tree and the table in shared memory
agree. Called by `prefix_cache` and `block_table` only. If the allocator refuses a move, the page is quarantined and
reported in `violations`; serving goes on.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.cache.allocator import PageAllocator, PageState, Violation
from kvstore.cache.events import EventLog
from kvstore.cache.page_table import EntryRun, PageEntry, PageTable, TableScan
from kvstore.cache.radix_tree import Node, RadixTree, Removed
from kvstore.errors import OwnershipError
from kvstore.hashing import NO_HASH, TOKEN_BYTES
from kvstore.layout import PADDING_PAGE

_MAX_VIOLATIONS: Final = 256
"""About 50 KB: each costs a page, so a pool that has seen so many is broken, and `num_violations` counts all."""


FullPageTold = Callable[[int, int, bytes, bytes], None]
"""Page, generation, hash and parent's hash of a page that others may use from now on."""


class BlockPool:
    """Changed together. `on_published`, if there is one, hears of each page that enters the tree.

    Generations go on from the table, whoever wrote it; `found` is its scan, made here if None.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        tree: RadixTree,
        table: PageTable | None,
        *,
        group: str,
        epoch: int,
        found: TableScan | None = None,
    ) -> None:
        self.allocator = allocator
        self.tree = tree
        self.table = table
        self.epoch = epoch
        self.page_size = tree.page_size
        self.stride = tree.page_size * TOKEN_BYTES
        self.log = EventLog(tree.runs, group)
        self.violations: deque[Violation] = deque(maxlen=_MAX_VIOLATIONS)
        self.num_violations = 0
        self.num_evicted_pages = 0
        self.on_published: FullPageTold | None = None
        num_pages = allocator.num_pages
        found = found or (table.scan() if table is not None else None)
        self._generations = found.generations() if found is not None else [0] * num_pages
        # A torn entry hides its generation, which is at most one allocation ahead of the readable ones: the size of the
        # pool is margin enough.
        self._last_generation = max(self._generations) + num_pages

    def generation(self, page: int) -> int:
        return self._generations[page]

    def num_available(self) -> int:
        return self.allocator.num_free + self.tree.num_evictable

    def take(
        self, num_pages: int, first_parent: bytes | None, is_first: bool, state: PageState = PageState.RUNNING
    ) -> list[int] | None:
        """Allocate pages for a sequence, evicting cached ones if too few are free; all or None.

        `first_parent` is the parent's hash of the first page, if it is known. They are `state` from the start: RUNNING,
        or GRANTED if they are about to be lent, so that they are neither moved nor written twice.
        """
        # Checked before anything is evicted: a sequence that cannot be served must not empty the cache for others.
        if num_pages > self.num_available():
            return None
        shortage = num_pages - self.allocator.num_free
        if shortage > 0:
            # Not written to the table: each of these pages is allocated again below; until then its entry is true.
            self._forget(self.tree.evict(shortage))
        pages = self.allocator.allocate(num_pages, state)
        if pages is None:
            return None
        # One counter for all pages, not one for each: a generation then identifies an allocation in the whole pool.
        for generation, page in enumerate(pages, self._last_generation + 1):
            self._generations[page] = generation
        self._last_generation += num_pages
        # The parents' hashes of the others are known only when the page before is full.
        # Before anybody is told of the pages: whoever copies one compares its generation.
        self.write_run(pages, [state] * num_pages, parent=first_parent, is_first=is_first)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        self.write_states(self.move(self.allocator.release, pages), PageState.FREE)

    def drop(self, removed: Removed) -> None:
        if removed.pages:
            self.write_states(self._forget(removed), PageState.FREE)

    def publish(
        self, node: Node, key: bytes, pages: Sequence[int], hashes: Sequence[bytes], extra_key: str
    ) -> tuple[Node, list[int]]:
        """Put full pages of a running sequence into the tree, below `node`, which the sequence has locked.

        Returns the locked node at their end, which replaces `node`, and the pages that the tree took; the others are
        duplicates and stay with the sequence.
        """
        parent = node.hashes[-1] if node.hashes else node.root
        inserted = self.tree.insert(node.root, key, pages, hashes, node)
        # Locked before the old lock is released: in between, the pages could be evicted.
        end = self.tree.lock(inserted.end)
        self.tree.unlock(node)
        first = len(pages) - len(inserted.added)
        if len(self.move(self.allocator.cache, inserted.added)) < len(inserted.added):
            # A page in doubt must not be found by another prompt.
            self.clear_tree()
            first = len(pages)
        # Those that the tree took are CACHED now; duplicates are still RUNNING, and pages in doubt QUARANTINED.
        states = self.allocator.states(pages)
        self.write_run(pages, states, hashes=hashes, parent=parent, tokens=key, is_first=node.parent is None)
        # Only pages that the tree took: a duplicate was announced when its first copy came.
        parents = [parent, *hashes]
        self.log.stored(key[first * self.stride :], hashes[first:], parents[first], extra_key)
        if self.on_published is not None:
            for index in range(first, len(pages)):
                self.on_published(pages[index], self._generations[pages[index]], hashes[index], parents[index])
        return end, inserted.added

    def clear_tree(self) -> None:
        self.drop(self.tree.clear())
        self.log.cleared()

    def write(
        self,
        page: int,
        state: PageState,
        *,
        page_hash: bytes = NO_HASH,
        parent: bytes | None = None,
        tokens: bytes = b"",
        is_first: bool = False,
        is_private: bool = False,
    ) -> None:
        if self.table is not None:
            entry = PageEntry(
                state, self._generations[page], self.epoch, page_hash, parent or NO_HASH, tokens, is_first, is_private
            )
            self.table.write(page, entry)

    def write_run(
        self,
        pages: Sequence[int],
        states: Sequence[PageState],
        *,
        hashes: Sequence[bytes] = (),
        parent: bytes | None = None,
        tokens: bytes = b"",
        is_first: bool = False,
        is_private: bool = False,
    ) -> None:
        """As `write` for each of `pages`, for less: their entries as columns, as `EntryRun` has them."""
        if not pages:
            # Most sequences end without a page that nobody else has, and most locks without one that only they kept.
            return
        if len(pages) == 1:
            # Each page that decoding fills: columns of one item cost 2 us more than the entry by itself, 3 us.
            page_hash = hashes[0] if hashes else NO_HASH
            self.write(
                pages[0], states[0],
                page_hash=page_hash, parent=parent, tokens=tokens, is_first=is_first, is_private=is_private,
            )  # fmt: skip
        elif self.table is not None:
            known = self._generations
            generations = [known[page] for page in pages]
            run = EntryRun(states, generations, self.epoch, hashes, parent or NO_HASH, tokens, is_first, is_private)
            self.table.write_run(pages, run)

    def write_states(self, pages: Sequence[int], state: PageState) -> None:
        self.write_run(pages, [state] * len(pages))

    def move(self, move: Callable[[Sequence[int]], None], pages: Sequence[int]) -> list[int]:
        """Apply a move of the allocator to all pages; returns those that moved, reports and quarantines the others."""
        try:
            move(pages)
        except OwnershipError:
            return [page for page in dict.fromkeys(pages) if self._move_one(move, page)]
        return list(pages)

    def report(self, violations: Sequence[Violation]) -> None:
        """Record violations whose pages are quarantined already."""
        self.num_violations += len(violations)
        self.violations.extend(violations)

    # inside

    def _move_one(self, move: Callable[[Sequence[int]], None], page: int) -> bool:
        try:
            move([page])
        except OwnershipError as error:
            self.report([Violation(page, error.found, error.needed)])
            if PADDING_PAGE < page < self.allocator.num_pages:
                self.allocator.quarantine([page])
                self.write(page, PageState.QUARANTINED)
            return False
        return True

    def _forget(self, removed: Removed) -> list[int]:
        self.num_evicted_pages += len(removed.pages)
        self.log.removed(removed.hashes)
        return self.move(self.allocator.evict, removed.pages)
