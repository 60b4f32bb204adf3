"""Carries out a session's copies: compares generations, copies, compares again.

A page's generation changes before anything else is written to it, so a copy whose pages had the right generations
before and after it holds what was announced. A source whose page table cannot be read from here compares for itself,
which is the transport's business. Called by the kv_agent's core with the session's `StartCopy`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.cache.page_table import PageTable
from kvstore.errors import TransferError
from kvstore.pool.page_pool import PagePool
from kvstore.transfer.base import Descriptor, Direction, Peer, SourcePages, Transport
from kvstore.transfer.plan import coalesce, page_descriptors
from kvstore.transfer.session import CopyEnded, StartCopy


class Target(NamedTuple):
    """A local pool as a transport knows it."""

    region: int
    pool: PagePool
    table: PageTable


class Cut(NamedTuple):
    """What of a copy's pages is copied, where it is not all of them: one tensor-parallel rank's share.

    `book` is the pool whose page table tells of the source's pages, that of its rank 0.
    """

    parts: Sequence[Descriptor]
    book: Peer


class Ended(NamedTuple):
    """A copy of grant `grant_id` is over; `num_bytes` were moved."""

    grant_id: str
    event: CopyEnded
    num_bytes: int


class _Running(NamedTuple):
    grant_id: str
    copy: StartCopy
    target: Target
    book: Peer


class PagePuller:
    """Copies of all sessions of one agent, over one transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._running: dict[int, _Running] = {}

    @property
    def is_busy(self) -> bool:
        """Whether `pump` has more to do; call it again soon."""
        return self.transport.num_posted > 0

    def target(self, pool: PagePool) -> Target:
        """Register a local pool."""
        return Target(self.transport.register(pool), pool, pool.table())

    def start(self, grant_id: str, copy: StartCopy, target: Target, peer: Peer, cut: Cut | None = None) -> Ended | None:
        """Begin a copy; its end comes from `pump`, or at once where its pages are not what they should be."""
        if cut is None:
            runs = coalesce(copy.source_pages, copy.pages)
            cut = Cut(page_descriptors(runs, target.pool.layout.page_bytes), peer)
        problem = _compare(copy, target, cut.book, "before")
        if problem is None:
            try:
                announced = SourcePages(copy.source_pages, copy.source_generations)
                handle = self.transport.post(Direction.READ, target.region, peer, cut.parts, copy.deadline, announced)
            except TransferError as error:
                problem = error
            else:
                self._running[handle] = _Running(grant_id, copy, target, cut.book)
                return None
        return Ended(grant_id, CopyEnded(copy.copy_id, problem.code, problem.message), 0)

    def cancel(self, grant_id: str, copy_id: int) -> None:
        """End a copy early; its end still comes from `pump`."""
        for handle, running in self._running.items():
            if running.grant_id == grant_id and running.copy.copy_id == copy_id:
                self.transport.cancel(handle)

    def pump(self, now: float) -> list[Ended]:
        """Let the transport work for a moment; returns the copies that ended."""
        ended: list[Ended] = []
        for completion in self.transport.poll(now):
            running = self._running.pop(completion.handle)
            problem = completion.error or _compare(running.copy, running.target, running.book, "after")
            code, message = (problem.code, problem.message) if problem else ("", "")
            ended.append(Ended(running.grant_id, CopyEnded(running.copy.copy_id, code, message), completion.num_bytes))
        return ended


def _compare(copy: StartCopy, target: Target, peer: Peer, when: str) -> TransferError | None:
    """Why the pages are not those that were announced and granted; None if they are."""
    sides = (
        ("source", copy.source_pages, copy.source_generations, peer.generations),
        ("destination", copy.pages, copy.generations, target.table.peek_generations),
    )
    for side, pages, expected, look in sides:
        try:
            found = look(pages)
        except ValueError as error:
            return TransferError("source_lost", f"the {side}'s page table could not be read {when} the copy: {error}")
        if found is not None and found != expected:
            page, wanted, there = next(one for one in zip(pages, expected, found, strict=True) if one[1] != one[2])
            text = f"{side} page {page} is of generation {there} {when} the copy, announced was {wanted}"
            return TransferError("stale_pages", text)
    return None
