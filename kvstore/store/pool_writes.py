"""Stores pages of an agent's own pools: which wait, which are being written, and whether they still are what they were.

A page is written from the pool's memory as it is, without a copy and without a lock. Its scheduler may give it to
another sequence meanwhile; then its generation in the page table changes before anything else is written to it. So
generations are compared before a write begins and again when the bytes are on the disk, as `transfer/puller.py` does,
and a page whose generation has changed is not stored.

Owned by whoever owns the store. Pure but for the pools' memory and the store.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstore.cache.page_table import PageTable
from kvstore.pool.page_pool import PagePool
from kvstore.store.index import PageName
from kvstore.store.interface import Store
from kvstore.store.missing import CHANGED, FLUSHED, QUEUE_FULL
from kvstore.store.operations import Write


class Storable(NamedTuple):
    """A full page of a pool, as its scheduler told it."""

    page: int
    generation: int
    name: PageName


class WriteLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many pages may wait, how many one write has, how long fewer wait for others, and bytes a second (0: as fast
    as the disk takes them).

    4,096 pages are 65,536 tokens, what a prefill computes in tens of seconds on a CPU; those of one write are a run.
    """

    queued_pages: int = 4096
    batch_pages: int = 64
    gather_s: float = 0.0
    bytes_per_s: float = 0.0


DEFAULT_WRITE_LIMITS: WriteLimits = WriteLimits()


class _Group(NamedTuple):
    """Pools of a group by rank; the page table in use is that of rank 0."""

    pools: Sequence[PagePool]
    table: PageTable


class _Batch(NamedTuple):
    """Pages of one write, by its claims."""

    group: str
    pages: Sequence[Storable]


class PoolWrites:
    """Pages offered by schedulers on their way into `store`. `counts` are those that were not stored, by reason."""

    def __init__(self, store: Store, limits: WriteLimits = DEFAULT_WRITE_LIMITS) -> None:
        self._store = store
        self._limits = limits
        self._groups: dict[str, _Group] = {}
        # By group: prefill and decode offer in turns, and a write has pages of one of them.
        self._queues: dict[str, deque[Storable]] = {}
        self._gathers_since: float | None = None
        self._batches: dict[Write, _Batch] = {}
        self._not_before = 0.0
        self.counts: Counter[str] = Counter()

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def is_idle(self) -> bool:
        """Whether everything that was offered is stored, or is known not to be."""
        return not self._queues and not self._batches

    def add(self, group: str, pools: Sequence[PagePool]) -> None:
        """Pools of one of the agent's own groups, by rank. Raises PagesElsewhere if their pages are on a device."""
        for pool in pools:
            pool.pages_view  # noqa: B018 - raises
        self._groups[group] = _Group(pools, pools[0].table())

    def remove(self, group: str) -> None:
        """Its pools are about to be closed, or their pages to be freed: nothing of them is stored from now on."""
        self._groups.pop(group, None)

    def is_writing(self, group: str) -> bool:
        """Whether a write still reads its pools' memory."""
        return any(batch.group == group and write.reads_memory for write, batch in self._batches.items())

    def offer(self, group: str, pages: Sequence[Storable]) -> int:
        """Queue pages, parents first; returns how many fit. Those that do not are missed, as they were never stored."""
        room = self._limits.queued_pages - self.num_queued
        # The first ones: without them, those that follow could not be found.
        if taken := pages[:room]:
            self._queues.setdefault(group, deque()).extend(taken)
        dropped = max(0, len(pages) - room)
        self.counts["queue full"] += dropped
        self._store.missing.add_hashes([page.name.page_hash for page in pages[max(0, room) :]], QUEUE_FULL)
        return len(pages) - dropped

    def forget(self) -> None:
        """Pages that still wait are not stored: the store is being flushed."""
        for queue in self._queues.values():
            self.counts["flushed"] += len(queue)
            self._store.missing.add_hashes([page.name.page_hash for page in queue], FLUSHED)
        self._queues.clear()

    def pump(self, now: float) -> float | None:
        """Begin what may begin. Returns the seconds after which to call again; None: after `settle` or an `offer`."""
        while self._queues:
            if now < self._not_before:
                return self._not_before - now
            if self._store.must_wait(self._limits.batch_pages):
                return None
            if self._gathers_since is None:
                self._gathers_since = now
            left_s = self._gathers_since + self._limits.gather_s - now
            if left_s > 0 and self.num_queued < self._limits.batch_pages:
                return left_s
            self._begin(now)
        self._gathers_since = None
        return None

    def settle(self, write: Write) -> None:
        """The store has returned a write: compare its generations again and commit it, or it is over."""
        if write.is_written:
            del self._batches[write]
            return
        batch = self._batches[write]
        self._store.commit(write, self._are_current(batch.group, batch.pages))

    # inside

    def _begin(self, now: float) -> None:
        name, pages = self._next_batch()
        current = self._are_current(name, pages)
        changed = [page.name.page_hash for page, is_current in zip(pages, current, strict=True) if not is_current]
        self.counts["changed before"] += len(changed)
        self._store.missing.add_hashes(changed, CHANGED)
        pages = [page for page, is_current in zip(pages, current, strict=True) if is_current]
        if not pages:
            return
        pools = self._groups[name].pools
        views = [[pool.page(storable.page) for pool in pools] for storable in pages]
        write = self._store.begin_write([storable.name for storable in pages], views)
        if write is None:
            return
        self._batches[write] = _Batch(name, [pages[position] for position in write.positions])
        if self._limits.bytes_per_s:
            self._not_before = max(now, self._not_before) + write.num_bytes / self._limits.bytes_per_s

    def _next_batch(self) -> tuple[str, list[Storable]]:
        """The first pages of one group; groups take turns."""
        group = next(iter(self._queues))
        queue = self._queues.pop(group)
        pages = [queue.popleft() for _ in range(min(len(queue), self._limits.batch_pages))]
        if queue:
            # Behind the others, so that none waits for all of another's.
            self._queues[group] = queue
        return group, pages

    def _are_current(self, name: str, pages: Sequence[Storable]) -> list[bool]:
        group = self._groups.get(name)
        if group is None:
            return [False] * len(pages)
        # Page numbers come from another process: those outside the pool would be an error for all of them.
        inside = [0 <= storable.page < group.table.num_pages for storable in pages]
        numbers = [storable.page if is_inside else 0 for storable, is_inside in zip(pages, inside, strict=True)]
        found = group.table.peek_generations(numbers)
        return [
            is_inside and generation == storable.generation
            for is_inside, generation, storable in zip(inside, found, pages, strict=True)
        ]
