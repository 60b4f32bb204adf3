"""Carries out a session's copies, at all tensor-parallel ranks: compares generations, copies, compares again.

A page's generation changes before anything else is written to it, so a copy whose pages had the right generations
before and after it holds what was announced. If the source's page table cannot be read from here, the source compares
for itself; the transport sees to that.

Page numbers are the same in all pools of a group, and rank 0's page table describes the pages of all ranks: a page has
one generation for every rank, because the group's scheduler allocates it once. So a grant covers the pages of all
ranks, each rank's bytes are copied while rank 0's generations are compared, and the copy ends when the last rank's has
ended; it fails if one rank's fails.

Between groups of equal size, rank r is copied from rank r in whole pages, by any transport. Between unequal sizes,
pages are cut by heads (`plan.py`), a few pages at a time because the pieces are many; only a transport that
`cuts_pages` does that, others are refused with `unequal_ranks`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.cache.page_table import PageTable
from kvstore.errors import TransferError
from kvstore.pool.device import memory_kind
from kvstore.pool.page_pool import PagePool
from kvstore.transfer.base import Peer, SourcePages, Transfer, Transport
from kvstore.transfer.plan import (
    Descriptor,
    coalesce,
    head_copies,
    map_heads,
    page_descriptors,
    strided_descriptors,
)
from kvstore.transfer.session import CopyEnded, StartCopy

MIXED_MEMORY: Final = "mixed_memory"
UNEQUAL_RANKS: Final = "unequal_ranks"
MAX_PIECES: Final = 4096
"""Pieces of pages that are planned at once: that takes some milliseconds of the agent's loop."""


class Ended(NamedTuple):
    """A copy of grant `grant_id` is over; `num_bytes` were moved, the last of them over `transport`."""

    grant_id: str
    event: CopyEnded
    num_bytes: int
    transport: str = ""


class _Copy:
    """A session's copy: the transfers still to begin, those that run, and the outcome of the others."""

    __slots__ = (
        "book", "error", "grant_id", "num_bytes", "num_good", "order", "running", "table", "transfers", "transport",
    )  # fmt: skip

    def __init__(self, grant_id: str, order: StartCopy, table: PageTable, book: Peer) -> None:
        self.grant_id = grant_id
        self.order = order
        # Both are rank 0's: our page table, and the source's pool.
        self.table = table
        self.book = book
        self.transfers: Iterator[_Part] = iter(())
        self.running: list[_Part] = []
        self.num_bytes = 0
        # Of whole pages, which are at least right at all ranks that have ended.
        self.num_good = len(order.pages)
        self.transport = ""
        self.error: TransferError | None = None


class _Side(NamedTuple):
    """Of a part: its pages in one pool, the generations that they are to have, and what tells those that they have."""

    name: str
    pages: Sequence[int]
    generations: Sequence[int]
    look: Callable[[Sequence[int]], Sequence[int] | None]


class _Part(Transfer):
    """A part of a copy: the pages in `pages`, from one source pool into one destination pool."""

    __slots__ = ("copy", "pages")

    def __init__(self, copy: _Copy, pages: StartCopy, pool: PagePool, peer: Peer, parts: Sequence[Descriptor]) -> None:
        super().__init__(pool, peer, parts, pages.deadline, SourcePages(pages.source_pages, pages.source_generations))
        self.copy = copy
        self.pages = pages


class PagePuller:
    """Runs the copies of all sessions of one agent over `transport`. The agent's pools are added by group and rank."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._pools: dict[str, Sequence[PagePool]] = {}
        # Rank 0's. Made once: a new one takes 10 µs, and reads each page a second time.
        self._tables: dict[str, PageTable] = {}
        self._copies: dict[tuple[str, int], _Copy] = {}

    @property
    def is_busy(self) -> bool:
        return self.transport.num_posted > 0

    def add(self, group: str, pools: Sequence[PagePool]) -> None:
        """Register pools of one of the agent's own groups, by rank. Raises PagesElsewhere, DeviceUnavailable."""
        for pool in pools:
            self.transport.register(pool)
        self._pools[group] = pools
        self._tables[group] = pools[0].table()

    def __contains__(self, group: str) -> bool:
        return group in self._pools

    def remove(self, group: str) -> None:
        self._pools.pop(group, None)
        self._tables.pop(group, None)
        self.transport.withdraw(group)

    def start(self, grant_id: str, order: StartCopy, group: str, source: Sequence[Peer]) -> Ended | None:
        """Pools by rank. `pump` returns its end, or this if it cannot begin. KeyError: `group` was not added."""
        pools = self._pools[group]
        copy = _Copy(grant_id, order, self._tables[group], source[0])
        self._copies[grant_id, order.copy_id] = copy
        copy.error = _refusal(pools, source)
        copy.transfers = (_whole_pages if len(pools) == len(source) else _cut_pages)(copy, pools, source)
        # One part for each rank now; the next is planned when one has ended, so that heads of a long prompt, cut into
        # thousands of pieces, are not all planned before the first is copied.
        for _ in pools:
            self._next(copy)
        return self._ended(copy)

    def cancel(self, grant_id: str, copy_id: int) -> None:
        copy = self._copies.get((grant_id, copy_id))
        if copy is not None:
            self._fail(copy, TransferError("cancelled", "the transfer was cancelled"))

    def pump(self, now: float) -> list[Ended]:
        """Let the transport work for a moment. Returns copies that ended at all ranks. `now` as in `Transport.poll`."""
        ended: list[Ended] = []
        for part in self.transport.poll(now):
            assert isinstance(part, _Part), "nobody else posts to an agent's transports"
            copy = part.copy
            copy.running.remove(part)
            copy.num_bytes += part.num_bytes
            copy.transport = part.transport.name
            # Compared again only now: between the first comparison and the last byte, the page may have been reused.
            if problem := part.error or _compare(part, "after"):
                copy.num_good = min(copy.num_good, _num_good(part))
                self._fail(copy, problem)
            self._next(copy)
            if (whole := self._ended(copy)) is not None:
                ended.append(whole)
        return ended

    def _next(self, copy: _Copy) -> None:
        """Begin the next part, unless one has failed already: then the others are ending, too."""
        if copy.error is not None:
            return
        try:
            # Planned here, which may raise as `post` does: heads may not divide among so many ranks.
            part = next(copy.transfers, None)
            if part is None:
                return
            problem = _compare(part, "before")
            if problem is None:
                self.transport.post(part)
                copy.running.append(part)
        except TransferError as error:
            problem = error
        if problem is not None:
            # A rank of which nothing was copied.
            copy.num_good = 0
        self._fail(copy, problem)

    def _fail(self, copy: _Copy, problem: TransferError | None) -> None:
        # The first reason stays: those that follow are of the parts that it cancels.
        if problem is None or copy.error is not None:
            return
        copy.error = problem
        for part in copy.running:
            self.transport.cancel(part)

    def _ended(self, copy: _Copy) -> Ended | None:
        if copy.running:
            return None
        del self._copies[copy.grant_id, copy.order.copy_id]
        code, message = (copy.error.code, copy.error.message) if copy.error else ("", "")
        num_good = copy.num_good if copy.error else 0
        ended = CopyEnded(copy.order.copy_id, code, message, num_good)
        return Ended(copy.grant_id, ended, copy.num_bytes, copy.transport)


def _refusal(pools: Sequence[PagePool], source: Sequence[Peer]) -> TransferError | None:
    here, there = pools[0].info, source[0].info
    if memory_kind(here.device) != memory_kind(there.device):
        between = f"pages on {there.device} cannot be copied to {here.device}"
        return TransferError(MIXED_MEMORY, f"{between}: give both groups devices, or neither")
    # Refused, not done piece by piece over a network: heads of one page are `2 * layers * page_size` pieces.
    if len(pools) == len(source) or all(peer.transport.cuts_pages for peer in source):
        return None
    between = f"{len(source)} ranks of {there.group} to {len(pools)} of {here.group}"
    return TransferError(
        UNEQUAL_RANKS, f"copying from {between} would cut pages by heads, which works only within one host's memory"
    )


def _whole_pages(copy: _Copy, pools: Sequence[PagePool], source: Sequence[Peer]) -> Iterator[_Part]:
    runs = coalesce(copy.order.source_pages, copy.order.pages)
    for pool, peer in zip(pools, source, strict=True):
        yield _Part(copy, copy.order, pool, peer, page_descriptors(runs, pool.layout.page_bytes))


def _cut_pages(copy: _Copy, pools: Sequence[PagePool], source: Sequence[Peer]) -> Iterator[_Part]:
    """A few pages at a time, the heads that each rank needs from each rank of the source."""
    layout, order = pools[0].layout, copy.order
    # At least one page, however many pieces it has: 28 layers of 16 tokens are 896.
    num_pages = max(1, MAX_PIECES // (layout.num_layers * 2 * layout.page_size))
    for at in range(0, len(order.pages), num_pages):
        share = order._replace(
            source_pages=order.source_pages[at : at + num_pages],
            source_generations=order.source_generations[at : at + num_pages],
            pages=order.pages[at : at + num_pages],
            generations=order.generations[at : at + num_pages],
        )
        runs = coalesce(share.source_pages, share.pages)
        for pool in pools:
            for piece in map_heads(len(source), pool.layout, pool.layout.model_kv_heads):
                peer = source[piece.source_rank]
                cut = head_copies(peer.info.layout, pool.layout, piece)
                yield _Part(copy, share, pool, peer, list(strided_descriptors(runs, cut)))


def _sides(part: _Part) -> tuple[_Side, _Side]:
    pages = part.pages
    return (
        _Side("source", pages.source_pages, pages.source_generations, part.copy.book.generations),
        _Side("destination", pages.pages, pages.generations, part.copy.table.peek_generations),
    )


def _num_good(part: _Part) -> int:
    """Pages of a part that has ended, from the first on, that are right whatever became of those behind them."""
    if part.pages is not part.copy.order:
        # Some of the pages, cut by heads: what is right of others, nobody counts.
        return 0
    num_good = len(part.pages.pages) if part.error is None else part.num_good
    for _, numbers, expected, look in _sides(part):
        if not num_good:
            return 0
        try:
            found = look(numbers[:num_good])
        except ValueError:
            return 0
        if found is not None:
            alike = (there == wanted for there, wanted in zip(found, expected, strict=False))
            num_good = next((number for number, is_alike in enumerate(alike) if not is_alike), num_good)
    return num_good


def _compare(part: _Part, when: str) -> TransferError | None:
    for side, numbers, expected, look in _sides(part):
        try:
            found = look(numbers)
        except ValueError as error:
            return TransferError("source_lost", f"the {side}'s page table could not be read {when} the copy: {error}")
        # None: the page table is in another host's memory, and the transport had that host compare.
        if found is not None and found != expected:
            page, wanted, there = next(row for row in zip(numbers, expected, found, strict=True) if row[1] != row[2])
            text = f"{side} page {page} has generation {there} {when} the copy, but {wanted} was announced"
            return TransferError("stale_pages", text)
    return None
