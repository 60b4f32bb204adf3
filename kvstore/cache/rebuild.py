"""A prefix cache from what a page table says, after its scheduler died.

Full pages whose chain reaches a root are cached again. A partly filled page of a running sequence becomes an orphan: a
handle that holds it and its prefix until somebody claims it or the recovery lease is over. Pages lent to a transfer,
and torn ones, are quarantined until nothing can write them. Everything else is free.

Whatever the table says, the books are right afterwards and nothing is found that was not computed: an entry that
contradicts itself, the others or this scheduler's epoch is dropped, its page is free, and `num_dropped` counts it.
Memory is not trusted to be what a scheduler wrote; only that nothing writes it now.

Only after the worker has answered `Adopted` may the table be read: until then steps of the dead scheduler run.
"""

import gc
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.cache.allocator import PageAllocator, PageState
from kvstore.cache.eviction import EvictionPolicy
from kvstore.cache.page_book import generations_of
from kvstore.cache.page_table import PLAUSIBLE_GENERATIONS, PageEntry, PageTable, Torn
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.sequence_pages import SequencePages
from kvstore.hashing import NO_HASH, chain_hashes, pack_tokens, page_hash, root_hash
from kvstore.layout import PADDING_PAGE

if TYPE_CHECKING:
    from kvstore.cache.radix_tree import Node

_UNSAFE: Final = frozenset({PageState.GRANTED, PageState.IN_FLIGHT, PageState.QUARANTINED})


class _Full(NamedTuple):
    page: int
    entry: PageEntry


class Orphans:
    """Sequences that ran when their scheduler died, each until it is claimed or the lease is over."""

    def __init__(self, cache: PrefixCache, handles: Iterable[SequencePages] = ()) -> None:
        self._cache = cache
        self._by_parent: dict[bytes, list[SequencePages]] = {}
        for handle in handles:
            self._by_parent.setdefault(handle.parent_hash, []).append(handle)

    def __len__(self) -> int:
        return sum(len(handles) for handles in self._by_parent.values())

    def claim(self, token_ids: Sequence[int], extra_key: str = "", *, lora: str = "") -> SequencePages | None:
        """The orphan that has most of these tokens, but not all: the last one must be computed. None: no such orphan.

        A claimed handle is the caller's to release; `num_cached_tokens` says how much of it is reused.
        """
        root = root_hash(extra_key, lora=lora, weight_version=self._cache.weight_version)
        parents = [root, *chain_hashes(root, token_ids, self._cache.page_size)]
        packed = pack_tokens(token_ids)
        for index in range(len(parents) - 1, -1, -1):
            rest = packed[index * self._cache.book.stride :]
            fitting = [
                handle
                for handle in self._by_parent.get(parents[index], ())
                if rest.startswith(handle.tail_tokens) and handle.num_tokens < len(token_ids)
            ]
            if fitting:
                best = max(fitting, key=lambda handle: handle.num_tokens)
                self._by_parent[parents[index]].remove(best)
                best.name_extra_key(extra_key)
                return best
        return None

    def release(self) -> None:
        """The lease is over: what nobody claimed may be evicted."""
        for handles in self._by_parent.values():
            for handle in handles:
                handle.release()
        self._by_parent.clear()


class Rebuilt(NamedTuple):
    """`quarantined` pages wait for `PrefixCache.clear_quarantined`; `num_torn` of them had no believable entry.

    `num_dropped` pages had a whole entry that cannot be true, or that hangs on a page that is lost.
    """

    cache: PrefixCache
    orphans: Orphans
    quarantined: list[int]
    num_torn: int
    num_dropped: int


@contextmanager
def _collector_paused() -> Generator[None]:
    """Nothing here is in a cycle, and a collection looks at all of it, again and again: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def rebuild(
    table: PageTable, *, group: str, epoch: int, weight_version: str = "", policy: EvictionPolicy | None = None
) -> Rebuilt:
    """Build cache, allocator and tree from `table`, and write the table anew where it changes."""
    found = list(table.scan())
    cache = PrefixCache(
        PageAllocator(table.num_pages),
        table.page_size,
        group=group,
        epoch=epoch,
        table=table,
        weight_version=weight_version,
        policy=policy,
        generations=generations_of(found),
    )
    torn: list[int] = []
    dropped: set[int] = set()
    entries: dict[int, PageEntry] = {}
    for page, entry in found:
        if page == PADDING_PAGE:
            continue
        if isinstance(entry, Torn):
            torn.append(page)
        elif not _is_of_this_pool(entry, epoch):
            dropped.add(page)
        else:
            entries[page] = entry
    cached = _rebuild_tree(cache, _full_pages(entries, table.page_size))
    lent = [page for page, entry in entries.items() if entry.state in _UNSAFE]
    cache.book.adopt(lent + torn, PageState.QUARANTINED)
    cache.book.write_states(lent + torn, PageState.QUARANTINED)
    orphans = _resume_all(cache, entries, cached, dropped)
    cache.book.write_states(sorted(dropped), PageState.FREE)
    cache.events.restate()
    return Rebuilt(cache, Orphans(cache, orphans), sorted(lent + torn), len(torn), len(dropped))


def _resume_all(
    cache: PrefixCache, entries: dict[int, PageEntry], cached: dict[bytes, int], dropped: set[int]
) -> list[SequencePages]:
    """Handles on what was running; pages in use that are neither cached nor resumed become free."""
    orphans: list[SequencePages] = []
    resumed: list[int] = []
    cached_pages = set(cached.values())
    for page, entry in entries.items():
        if entry.state not in (PageState.RUNNING, PageState.CACHED) or page in cached_pages:
            continue
        if not _can_be_true(entry, cached, cache.page_size):
            dropped.add(page)
        elif (orphan := _resume(cache, page, entry, entries, cached)) is not None:
            orphans.append(orphan)
            resumed.append(page)
        else:
            cache.book.write_states([page], PageState.FREE)
    cache.book.adopt(resumed, PageState.RUNNING)
    return orphans


def _is_of_this_pool(entry: PageEntry, epoch: int) -> bool:
    """Epochs only rise: whoever comes after this scheduler has written nothing yet."""
    return (
        entry.state is not PageState.RESERVED
        and entry.owner_epoch <= epoch
        and entry.generation <= PLAUSIBLE_GENERATIONS
    )


def _can_be_true(entry: PageEntry, cached: dict[bytes, int], page_size: int) -> bool:
    """Whether a scheduler may have left this entry of a page that is not in the cache now."""
    if entry.page_hash == NO_HASH:
        return entry.state is PageState.RUNNING and entry.fill < page_size
    # A sequence's own full page: private, or the double of a page that is cached.
    return entry.state is PageState.RUNNING and (entry.is_private or entry.page_hash in cached)


def _full_pages(entries: dict[int, PageEntry], page_size: int) -> dict[bytes, list[_Full]]:
    """Full, shareable pages whose hash is right, by the hash before them; of equal pages only the first."""
    by_parent: dict[bytes, list[_Full]] = {}
    seen: set[bytes] = set()
    # Cached ones first: they are the ones that others may have continued from.
    for page, entry in sorted(entries.items(), key=lambda item: (item[1].state is not PageState.CACHED, item[0])):
        usable = entry.state in (PageState.CACHED, PageState.RUNNING) and not entry.is_private
        if not usable or entry.fill != page_size or entry.page_hash in seen:
            continue
        if page_hash(entry.parent_hash, entry.tokens) == entry.page_hash:
            seen.add(entry.page_hash)
            by_parent.setdefault(entry.parent_hash, []).append(_Full(page, entry))
    return by_parent


def _rebuild_tree(cache: PrefixCache, by_parent: dict[bytes, list[_Full]]) -> dict[bytes, int]:
    """Insert every chain that begins at a root; returns the pages that are cached now, by hash."""
    book = cache.book
    cached: dict[bytes, int] = {}
    firsts = [one for pages in by_parent.values() for one in pages if one.entry.is_first]
    starts: list[tuple[Node | None, bytes, _Full]] = [(None, first.entry.parent_hash, first) for first in firsts]
    while starts:
        # No hash is there twice, and a first page continues none: nobody is come upon twice.
        above, root, one = starts.pop()
        run = [one]
        while len(following := _following(by_parent, run[-1])) == 1:
            run.append(following[0])
        key = b"".join(full.entry.tokens for full in run)
        hashes = [full.entry.page_hash for full in run]
        pages = [full.page for full in run]
        end = book.tree.insert(root, key, pages, hashes, above).end.node
        for full in run:
            if full.entry.state is not PageState.CACHED:
                entry = full.entry
                book.write(
                    full.page,
                    PageState.CACHED,
                    page_hash=entry.page_hash,
                    parent=entry.parent_hash,
                    tokens=entry.tokens,
                    is_first=entry.is_first,
                )
        cached.update(zip(hashes, pages, strict=True))
        starts.extend((end, root, child) for child in _following(by_parent, run[-1]))
    book.adopt(list(cached.values()), PageState.CACHED)
    return cached


def _following(by_parent: dict[bytes, list[_Full]], one: _Full) -> list[_Full]:
    """Pages that continue this one. One that says it is the first of its chain continues nothing."""
    return [child for child in by_parent.get(one.entry.page_hash, []) if not child.entry.is_first]


def _resume(
    cache: PrefixCache, page: int, entry: PageEntry, entries: dict[int, PageEntry], cached: dict[bytes, int]
) -> SequencePages | None:
    """A handle on a running sequence's last page and everything before it, if all of that is there."""
    is_partial = entry.page_hash == NO_HASH and entry.parent_hash != NO_HASH and not entry.is_private
    if entry.state is not PageState.RUNNING or not is_partial:
        return None
    tokens: list[bytes] = []
    parent, is_first = entry.parent_hash, entry.is_first
    while not is_first:
        above = cached.get(parent)
        if above is None:
            return None
        tokens.append(entries[above].tokens)
        parent, is_first = entries[above].parent_hash, entries[above].is_first
    match = cache.book.tree.match_prefix(parent, b"".join(reversed(tokens)))
    return cache.resume(cache.book.tree.lock(match), match.pages, page, entry.tokens)
