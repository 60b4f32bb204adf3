"""Rebuilds a prefix cache from its page table, after its scheduler died.

Full pages whose chain reaches a root are cached again. A partly filled page of a running sequence becomes a
`BlockTable`: a handle that holds it and its prefix until it is claimed or the recovery lease ends. Pages lent to a
transfer, and torn ones, are quarantined until nothing can write them. Everything else is free.

Whatever the table says, the books are right afterwards and no prefix is found that was not computed: an entry that
contradicts itself, the others or this scheduler's epoch is dropped, its page is free, and `num_dropped` counts it. The
memory is not trusted to be what a scheduler wrote; the only assumption is that nothing writes it now.

The table may be read only after the worker has answered `Adopted`: until then, steps of the dead scheduler run.
"""

import gc
import struct
from collections.abc import Container, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.cache.allocator import PageState
from kvstore.cache.block_table import BlockTable
from kvstore.cache.eviction import EvictionPolicy
from kvstore.cache.page_table import (
    FLAG_FIRST,
    FLAG_PRIVATE,
    HASH_OFFSET,
    PLAUSIBLE_GENERATIONS,
    PageEntry,
    PageTable,
    TableScan,
)
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.hashing import HASH_BYTES, NO_HASH, TOKEN_BYTES, chain_hashes, content_hash, pack_tokens, root_hash
from kvstore.layout import PADDING_PAGE

if TYPE_CHECKING:
    from kvstore.cache.page_table import Slots
    from kvstore.cache.radix_tree import Node

_UNSAFE: Final = [PageState.GRANTED, PageState.IN_FLIGHT, PageState.QUARANTINED]
_IN_USE: Final = [PageState.CACHED, PageState.RUNNING]


class _Full(NamedTuple):
    """Full pages that their scheduler shared, in columns: page, slot (of a `TableScan`), hash, parent's hash.

    `known` maps the hash of each page whose hash is right to its index; of equal ones, only the first.
    """

    pages: list[int]
    slots: "Slots"
    names: list[bytes]
    parents: list[bytes]
    known: dict[bytes, int]

    def key(self, numbers: Sequence[int]) -> bytes:
        return self.slots["tokens"][numbers].tobytes()

    def is_first(self, number: int) -> bool:
        return bool(self.slots["flags"][number] & FLAG_FIRST)


class RecoveredSequences:
    """Sequences that were running when their scheduler died, each kept until it is claimed or the lease ends."""

    def __init__(self, cache: PrefixCache, handles: Iterable[BlockTable] = ()) -> None:
        self._cache = cache
        self._by_parent: dict[bytes, list[BlockTable]] = {}
        for handle in handles:
            self._by_parent.setdefault(handle.parent_hash, []).append(handle)

    def __len__(self) -> int:
        return sum(len(handles) for handles in self._by_parent.values())

    def claim(self, token_ids: Sequence[int], extra_key: str = "") -> BlockTable | None:
        """The one with the most of these tokens but not all, as the last must be computed. The caller releases it."""
        root = root_hash(extra_key)
        parents = [root, *chain_hashes(root, token_ids, self._cache.page_size)]
        packed = pack_tokens(token_ids)
        # Longest first: a sequence found there has the most of these tokens written.
        for index in range(len(parents) - 1, -1, -1):
            rest = packed[index * self._cache.blocks.stride :]
            fitting = [
                handle
                for handle in self._by_parent.get(parents[index], ())
                if rest.startswith(handle.tail_tokens) and handle.num_tokens < len(token_ids)
            ]
            if fitting:
                best = max(fitting, key=lambda handle: handle.num_tokens)
                self._by_parent[parents[index]].remove(best)
                best.extra_key = extra_key
                return best
        return None

    def release(self) -> None:
        for handles in self._by_parent.values():
            for handle in handles:
                handle.release()
        self._by_parent.clear()


class Rebuilt(NamedTuple):
    """`quarantined` pages wait for `PrefixCache.clear_quarantined`; `num_torn` of them had no trustworthy entry.

    `num_dropped` pages had a whole entry that cannot be true, or that depends on a lost page.
    """

    cache: PrefixCache
    recovered: RecoveredSequences
    quarantined: list[int]
    num_torn: int
    num_dropped: int


@contextmanager
def _collector_paused() -> Generator[None]:
    """Pause the collector: nothing here is in a cycle, and scanning it again and again took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def rebuild(table: PageTable, *, group: str, epoch: int, policy: EvictionPolicy | None = None) -> Rebuilt:
    """Build cache, allocator and tree from `table`, and rewrite the table's entries that change."""
    found = table.scan()
    cache = PrefixCache(
        table.num_pages,
        table.page_size,
        group=group,
        epoch=epoch,
        table=table,
        policy=policy,
        found=found,
    )
    state, torn = found.slots["state"], found.is_torn
    # Its entry does not matter: page 0 never belongs to anybody.
    torn[PADDING_PAGE] = False
    # Epochs only rise: a scheduler after this one has written nothing yet.
    sound = (
        (state != PageState.RESERVED)
        & (found.slots["owner_epoch"] <= epoch)
        & (found.slots["generation"] <= PLAUSIBLE_GENERATIONS)
    )
    dropped = set(np.flatnonzero(~sound & ~torn).tolist()) - {PADDING_PAGE}
    sound &= ~torn
    sound[PADDING_PAGE] = False
    full = _full_pages(found, sound, table.page_size)
    cached = _rebuild_tree(cache, full)
    unsafe = np.flatnonzero(torn | sound & np.isin(state, _UNSAFE)).tolist()
    # Torn ones too: what cannot be read may hide a grant, whose copy may write until its deadline.
    cache.blocks.allocator.adopt(unsafe, PageState.QUARANTINED)
    cache.blocks.write_states(unsafe, PageState.QUARANTINED)
    left = sound & np.isin(state, _IN_USE)
    left[[full.pages[number] for number in cached.values()]] = False
    entries = {
        page: entry for page in np.flatnonzero(left).tolist() if isinstance(entry := found.entry(page), PageEntry)
    }
    recovered = _resume_all(cache, entries, full, cached, dropped)
    cache.blocks.write_states(sorted(dropped), PageState.FREE)
    # Followers of the cache have the predecessor's picture, and may have missed its last events.
    cache.events.restate()
    return Rebuilt(cache, RecoveredSequences(cache, recovered), unsafe, int(torn.sum()), len(dropped))


def _resume_all(
    cache: PrefixCache, entries: dict[int, PageEntry], full: _Full, cached: dict[bytes, int], dropped: set[int]
) -> list[BlockTable]:
    """Handles on what was running; pages in use that are neither cached nor resumed become free."""
    recovered: list[BlockTable] = []
    resumed: list[int] = []
    for page, entry in entries.items():
        if not _can_be_true(entry, cached, cache.page_size):
            dropped.add(page)
        elif (sequence := _resume(cache, page, entry, full, cached)) is not None:
            recovered.append(sequence)
            resumed.append(page)
        else:
            cache.blocks.write_states([page], PageState.FREE)
    cache.blocks.allocator.adopt(resumed, PageState.RUNNING)
    return recovered


def _can_be_true(entry: PageEntry, cached: Container[bytes], page_size: int) -> bool:
    """Whether a scheduler can have left this entry for a page that is not in the cache now."""
    if entry.page_hash == NO_HASH:
        return entry.state is PageState.RUNNING and entry.fill < page_size
    # A sequence's own full page: private, or a duplicate of a cached page.
    return entry.state is PageState.RUNNING and (entry.is_private or entry.page_hash in cached)


def _full_pages(found: TableScan, sound: npt.NDArray[np.bool_], page_size: int) -> _Full:
    slots = found.slots
    is_usable = sound & (slots["fill"] == page_size) & (slots["flags"] & FLAG_PRIVATE == 0)
    # Cached ones first: they are the ones that others may have continued from.
    pages = np.concatenate([np.flatnonzero(is_usable & (slots["state"] == state)) for state in _IN_USE])
    chosen = slots[pages]
    names, parents = _hashes(chosen["page_hash"]), _hashes(chosen["parent_hash"])
    # The input of a page's hash follows it in one piece.
    start, size = HASH_OFFSET + HASH_BYTES, HASH_BYTES + TOKEN_BYTES * page_size
    known: dict[bytes, int] = {}
    for number, (content,) in enumerate(struct.iter_unpack(f"{start}x{size}s", chosen.tobytes())):
        if (name := names[number]) == content_hash(content):
            # Every page is hashed again: others had this memory mapped, and a wrong hash would serve wrong KV.
            known.setdefault(name, number)
    return _Full(pages.tolist(), chosen, names, parents, known)


def _hashes(column: "Slots") -> list[bytes]:
    return [one for (one,) in struct.iter_unpack(f"{HASH_BYTES}s", column.tobytes())]


def _rebuild_tree(cache: PrefixCache, full: _Full) -> dict[bytes, int]:
    """Insert every chain that begins at a root; returns indices in `full` of the pages that are cached now, by hash."""
    blocks, pages, names = cache.blocks, full.pages, full.names
    # No hash occurs twice, and a first page continues no other: no page is visited twice.
    firsts, next_of, several = _links(full)
    starts: list[tuple[Node | None, bytes, int]] = [(None, full.parents[number], number) for number in firsts]
    cached: list[int] = []
    while starts:
        above, root, number = starts.pop()
        run = [number]
        while (number := next_of[number]) >= 0:
            run.append(number)
        hashes = [names[number] for number in run]
        # A whole run in one insertion: page by page, each would be attached to the tree and merged again.
        end = blocks.tree.insert(root, full.key(run), [pages[number] for number in run], hashes, above).end.node
        starts.extend((end, root, child) for child in several.get(run[-1], ()))
        cached += run
    is_running: list[bool] = (full.slots["state"] == PageState.RUNNING).tolist()
    for number in (number for number in cached if is_running[number]):
        blocks.write(
            pages[number],
            PageState.CACHED,
            page_hash=names[number],
            parent=full.parents[number],
            tokens=full.key([number]),
            is_first=full.is_first(number),
        )
    blocks.allocator.adopt([pages[number] for number in cached], PageState.CACHED)
    return {names[number]: number for number in cached}


def _links(full: _Full) -> tuple[list[int], list[int], dict[int, list[int]]]:
    """First pages of chains; for each page the only one that continues it, or -1; and pages that several continue."""
    known = np.fromiter(full.known.values(), np.intp, len(full.known))
    is_first: npt.NDArray[np.bool_] = full.slots["flags"][known] & FLAG_FIRST != 0
    # A page marked as the first of its chain continues nothing.
    inner = known[~is_first]
    numbers: list[int] = inner.tolist()
    above = np.array([full.known.get(full.parents[number], -1) for number in numbers], np.intp)
    inner, above = inner[above >= 0], above[above >= 0]
    is_only = np.bincount(above, minlength=len(full.pages))[above] == 1
    next_of = np.full(len(full.pages), -1)
    next_of[above[is_only]] = inner[is_only]
    several: dict[int, list[int]] = {}
    for parent, child in zip(above[~is_only].tolist(), inner[~is_only].tolist(), strict=True):
        several.setdefault(parent, []).append(child)
    return known[is_first].tolist(), next_of.tolist(), several


def _resume(
    cache: PrefixCache, page: int, entry: PageEntry, full: _Full, cached: dict[bytes, int]
) -> BlockTable | None:
    """A handle on a running sequence's last page and everything before it, if all of that is cached."""
    is_partial = entry.page_hash == NO_HASH and entry.parent_hash != NO_HASH and not entry.is_private
    if entry.state is not PageState.RUNNING or not is_partial:
        return None
    run: list[int] = []
    parent, is_first = entry.parent_hash, entry.is_first
    while not is_first:
        above = cached.get(parent)
        # A page before it is lost, so attention over the rest would have a hole.
        if above is None:
            return None
        run.append(above)
        parent, is_first = full.parents[above], full.is_first(above)
    match = cache.blocks.tree.match_prefix(parent, full.key(run[::-1]))
    return cache.resume(cache.blocks.tree.lock(match), match.pages, page, entry.tokens)
