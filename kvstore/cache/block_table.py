"""The pages of one running sequence: those it shares with others, its own, and those exported to a transfer.

    [ cached prefix, locked ][ own full pages (duplicates) ][ own, partly filled ][ own, reserved or exported ]

A handle is made by `PrefixCache.start` and ended by one `release`, whatever happened in between; until then its pages
cannot be evicted or given to anyone else. Only tokens whose KV is known to be written (`advance`, `commit`) are
committed and shared. Only the scheduler's sequences keep handles.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstore.cache.allocator import PageState
from kvstore.cache.block_pool import BlockPool
from kvstore.cache.radix_tree import Node
from kvstore.errors import SequenceError
from kvstore.hashing import TOKEN_BYTES, chain_packed, pack_tokens


class ExportedPages(NamedTuple):
    """Pages given to a transfer: `pages[i]` is page `first + i` of the sequence."""

    first: int
    pages: list[int]
    generations: list[int]


class BlockTable:
    """Pages of one sequence, in order of position. Callers only read fields; methods change them.

    `num_tokens` counts the tokens whose KV is written, `num_cached_tokens` those that were found in the cache at start.
    `page_hashes` are chained hashes of the full pages, `tail_tokens` the packed ids of the partly filled one; a
    transfer has the last `num_exported_pages`. Its pages are announced with `extra_key`; in a rebuilt sequence it is
    set when the sequence is claimed.
    """

    def __init__(
        self,
        blocks: BlockPool,
        node: Node,
        pages: list[int],
        hashes: list[bytes],
        *,
        extra_key: str,
        on_release: Callable[["BlockTable"], None],
    ) -> None:
        self.pages = pages
        self.num_tokens = len(pages) * blocks.page_size
        self.num_cached_tokens = self.num_tokens
        self.is_released = False
        self._blocks = blocks
        self._node = node
        self.page_hashes = hashes
        self.extra_key = extra_key
        self._on_release = on_release
        self._own: set[int] = set()
        self.tail_tokens = b""
        self.num_exported_pages = 0
        self._exported_state = PageState.GRANTED

    @property
    def parent_hash(self) -> bytes:
        return self.page_hashes[-1] if self.page_hashes else self._node.root

    def generations(self, first: int = 0, count: int | None = None) -> list[int]:
        end = len(self.pages) if count is None else first + count
        return [self._blocks.generation(page) for page in self.pages[first:end]]

    def num_missing(self, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._blocks.page_size) - len(self.pages))

    def reserve(self, num_tokens: int) -> bool:
        """Make the pages cover positions `0 .. num_tokens - 1`. False if there are not enough; nothing changes then."""
        return self._reserve(num_tokens, PageState.RUNNING)

    def _reserve(self, num_tokens: int, state: PageState) -> bool:
        self._require_held()
        missing = self.num_missing(num_tokens)
        if missing == 0:
            return True
        if self.num_exported_pages:
            raise SequenceError("pages are exported to a transfer: commit or abort that before reserving more")
        # After a partly filled page the parent's hash is not known yet.
        parent = self.parent_hash if len(self.pages) == len(self.page_hashes) else None
        taken = self._blocks.take(missing, parent, not self.pages, state)
        if taken is None:
            return False
        self.pages.extend(taken)
        if state is PageState.RUNNING:
            self._own.update(taken)
        return True

    def advance(self, token_ids: Sequence[int]) -> None:
        """Record that the KV of these tokens, the next ones, is written. Full pages enter the cache at once.

        Raises SequenceError if `reserve` has not covered them, ValueError for impossible ids; nothing changes then.
        """
        self._require_held()
        packed = self.tail_tokens + pack_tokens(token_ids)
        # Exported pages do not count: a transfer may be writing them at this moment.
        room = (len(self.pages) - self.num_exported_pages) * self._blocks.page_size - self.num_tokens
        if len(token_ids) > room:
            raise SequenceError(f"cannot advance by {len(token_ids)} tokens: the reserved pages have room for {room}")
        num_full = len(packed) // self._blocks.stride
        cut = num_full * self._blocks.stride
        self.tail_tokens = packed[cut:]
        self.num_tokens += len(token_ids)
        if num_full:
            self._fill(packed[:cut], num_full)
        self._write_tail()

    def export(self, num_tokens: int = 0) -> ExportedPages | None:
        """Reserve as `reserve(num_tokens)` does, then export every page that is not full to a transfer.

        None if there are not enough pages; nothing changes then. Tokens of a partly filled page are given up. The pages
        are GRANTED until `mark_in_flight`; `commit` makes them the sequence's own again, `abort` takes them out of it.
        The table says GRANTED all that time, since the difference is of no use to its readers. Raises SequenceError if
        some are exported already.
        """
        self._require_held()
        if self.num_exported_pages:
            raise SequenceError("pages of this sequence are already exported; one transfer takes all of them")
        first, written = len(self.page_hashes), len(self.pages)
        if not self._reserve(num_tokens, PageState.GRANTED):
            return None
        # Those reserved just now are GRANTED already, and their entries say so.
        if held := self.pages[first:written]:
            self._blocks.write_states(held, PageState.GRANTED)
            lent = self._blocks.move(self._blocks.allocator.grant, held)
            self._own.difference_update(lent)
            self.pages[first:written] = lent
        pages = self.pages[first:]
        self.num_exported_pages = len(pages)
        self._exported_state = PageState.GRANTED
        self.tail_tokens = b""
        self.num_tokens = first * self._blocks.page_size
        return ExportedPages(first, pages, self.generations(first))

    def mark_in_flight(self) -> None:
        """Record that the transfer may write the exported pages from now on. Idempotent."""
        if self.num_exported_pages and self._exported_state is PageState.GRANTED:
            self._blocks.move(self._blocks.allocator.start_transfer, self._exported_pages())
            self._exported_state = PageState.IN_FLIGHT

    def commit(self, token_ids: Sequence[int]) -> None:
        """The exported pages hold the KV of these tokens and are its own again. Raises SequenceError if too many."""
        self._require_held()
        exported = self._exported_pages()
        if len(token_ids) > len(exported) * self._blocks.page_size:
            raise SequenceError(f"{len(token_ids)} tokens do not fit in the {len(exported)} exported pages")
        self.num_exported_pages = 0
        self._own.update(self._blocks.move(self._blocks.allocator.accept, exported))
        self.advance(token_ids)
        self._blocks.write_states(self.pages[len(self.page_hashes) + 1 :], PageState.RUNNING)

    def commit_first(self, token_ids: Sequence[int]) -> None:
        """As `commit`, for the first of them; others stay exported. Raises SequenceError unless tokens fill pages."""
        self._require_held()
        if len(token_ids) % self._blocks.page_size:
            raise SequenceError(f"{len(token_ids)} tokens do not fill whole pages")
        received = self._exported_pages()[: len(token_ids) // self._blocks.page_size]
        # From the front: those that stay exported are at the end of `pages`.
        self.num_exported_pages -= len(received)
        self._own.update(self._blocks.move(self._blocks.allocator.accept, received))
        self.advance(token_ids)

    def abort(self, *, quiesced: bool) -> list[int]:
        """The transfer ended without its pages, which leave the sequence; a retry reserves new ones.

        If something can still write them (`quiesced` False), they are quarantined and returned, for
        `PrefixCache.clear_quarantined` once the agent has answered `GrantClosed`.
        """
        exported = self._exported_pages()
        # Even if nothing can write them: a retry gets another grant, and a grant's pages are never used twice.
        del self.pages[len(self.pages) - len(exported) :]
        self.num_exported_pages = 0
        if quiesced:
            self._blocks.write_states(self._blocks.move(self._blocks.allocator.revoke, exported), PageState.FREE)
            return []
        kept = self._blocks.move(self._blocks.allocator.quarantine, exported)
        self._blocks.write_states(kept, PageState.QUARANTINED)
        return kept

    def release(self) -> list[int]:
        """Pages still exported are quarantined and returned, as by `abort(quiesced=False)`. Idempotent."""
        if self.is_released:
            return []
        quarantined = self.abort(quiesced=False) if self.num_exported_pages else []
        self.is_released = True
        # Own pages first: those in the tree stay held until the unlock below.
        self._blocks.give_back([page for page in self.pages if page in self._own])
        self._blocks.drop(self._blocks.tree.unlock(self._node))
        self._own.clear()
        self._on_release(self)
        return quarantined

    def claims(self) -> Iterator[tuple[int, PageState]]:
        """Every page that this handle believes it holds, with the state it should be in."""
        node: Node | None = self._node
        while node is not None:
            yield from ((page, PageState.CACHED) for page in node.pages)
            node = node.parent
        yield from ((page, PageState.RUNNING) for page in self._own)
        yield from ((page, self._exported_state) for page in self._exported_pages())

    def adopt_tail(self, page: int, tokens: bytes) -> None:
        self.pages.append(page)
        self._own.add(page)
        self.tail_tokens = tokens
        self.num_tokens = len(self.page_hashes) * self._blocks.page_size + len(tokens) // TOKEN_BYTES
        self._write_tail()

    # inside

    def _exported_pages(self) -> list[int]:
        return self.pages[len(self.pages) - self.num_exported_pages :]

    def _fill(self, key: bytes, num_full: int) -> None:
        self.page_hashes += chain_packed(self.parent_hash, key, self._blocks.page_size)
        self._publish(key, num_full)

    def _publish(self, key: bytes, num_full: int) -> None:
        """Share the last `num_full` full pages, unless the cache was cleared since this sequence began."""
        last = len(self.page_hashes)
        pages = self.pages[last - num_full : last]
        # After `clear` (new weights) the tree must not hold anything computed with the old ones.
        if not self._blocks.tree.is_current(self._node) or not self._own.issuperset(pages):
            self._write_private(key, num_full)
            return
        self._node, added = self._blocks.publish(self._node, key, pages, self.page_hashes[-num_full:], self.extra_key)
        self._own.difference_update(added)

    def _write_private(self, key: bytes, num_full: int) -> None:
        first = len(self.page_hashes) - num_full
        self._blocks.write_run(
            self.pages[first : first + num_full],
            [PageState.RUNNING] * num_full,
            hashes=self.page_hashes[first:],
            parent=self.page_hashes[first - 1] if first else self._node.root,
            tokens=key,
            is_first=first == 0,
            is_private=True,
        )

    def _write_tail(self) -> None:
        """Write the entry of the first page not full, even if empty: its parent's hash says which sequence had it."""
        index = len(self.page_hashes)
        if index < len(self.pages) - self.num_exported_pages:
            self._blocks.write(
                self.pages[index],
                PageState.RUNNING,
                parent=self.parent_hash,
                tokens=self.tail_tokens,
                is_first=index == 0,
            )

    def _require_held(self) -> None:
        if self.is_released:
            raise SequenceError("the pages of this sequence have already been released")
