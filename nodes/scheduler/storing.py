"""Which full pages this scheduler's agent is told to keep on disk: each once, a turn's together. Owned by the core.

Pages are named by hashes of their tokens, not by how they were computed, so a store is of one fingerprint of numerics
(`Adopted.numerics`). What another group has prefilled, or an earlier worker left here, may have other bits, and what is
computed from it has, too. So once other numerics than the worker's own have been seen, nothing more is told. Pure.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.cache.block_table import BlockTable
from kvstore.protocol import StorePages
from mesh.calls.batches import cut
from nodes.roles import SCHEDULER
from nodes.scheduler.books import Books
from nodes.scheduler.events import ReadyPeer

_PAGE_BYTES: Final = 64
"""Of one page on the wire: two hashes of 16 bytes, two numbers, and what is around them."""


class _FullPage(NamedTuple):
    page: int
    generation: int
    page_hash: bytes
    parent: bytes


class PagesToStore:
    """Listens to `cache` if the configuration has pages stored, and costs nothing otherwise.

    By `write_through` that is each page that enters the cache; by `write_through_selective` each one with which a
    sequence starts, which for one that was put back may be its own.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        config, cache = books.config, books.cache
        self._fresh: list[_FullPage] = []
        self._seen: set[str] = set()
        self.num_told = 0
        self.num_mixed = 0
        # By page, the generation of which the agent was told last. Generations are never used twice.
        self._told = [0] * (cache.num_pages + 1)
        if config.stores == "write_through":
            cache.blocks.on_published = self._on_published
            # By the other policy it is a few of them, and whose those are is the agent's affair.
            cache.events.is_on_disk = True
        elif config.stores:
            cache.on_reused = self._on_reused

    def on_members(self, ready: Mapping[str, ReadyPeer]) -> None:
        """Ready members, among them all that may prefill for this scheduler from now on."""
        if self._books.config.stores:
            self._seen.update(peer.numerics for peer in ready.values() if peer.role == SCHEDULER)

    def are_stored(self, pages: list[int]) -> None:
        """These have just come from the disk, and went into the cache in this turn: it need not be told of them."""
        known = frozenset(pages)
        self._fresh = [one for one in self._fresh if one.page not in known]

    def flush(self) -> None:
        """Tell the agent what has gathered in this turn."""
        if not self._fresh:
            return
        fresh, self._fresh, numerics = self._fresh, [], self._books.numerics
        # Now, not when they were published: a worker that came back may compute otherwise than the one before.
        self._seen.add(numerics)
        if self.is_mixed:
            self.num_mixed += len(fresh)
            return
        self.num_told += len(fresh)
        # A prompt of 100,000 tokens has 6,000 pages, which would be more than a message may have.
        for some in cut(fresh, lambda _: _PAGE_BYTES):
            pages, generations, hashes, parents = (list(column) for column in zip(*some, strict=True))
            told = StorePages(
                group=self._books.config.group,
                incarnation=self._books.pool.incarnation,
                numerics=numerics,
                pages=pages,
                generations=generations,
                hashes=hashes,
                parents=parents,
            )
            self._books.outbox.tell(self._books.config.agent, told)

    @property
    def is_mixed(self) -> bool:
        """Whether nothing is told, since not all groups compute alike."""
        return len(self._seen) > 1

    def gauges(self) -> dict[str, float]:
        if not self._books.config.stores:
            return {}
        return {
            "mesh_scheduler_pages_to_store_total": self.num_told,
            "mesh_scheduler_pages_of_mixed_numerics_total": self.num_mixed,
        }

    # inside

    def _on_published(self, page: int, generation: int, page_hash: bytes, parent: bytes) -> None:
        self._fresh.append(_FullPage(page, generation, page_hash, parent))

    def _on_reused(self, sequence: BlockTable, root: bytes) -> None:
        hashes = sequence.page_hashes
        for index, (page, generation) in enumerate(zip(sequence.pages, sequence.generations(), strict=True)):
            if self._told[page] != generation:
                self._told[page] = generation
                self._fresh.append(_FullPage(page, generation, hashes[index], hashes[index - 1] if index else root))
