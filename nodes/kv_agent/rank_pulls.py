"""One copy of a session for all tensor-parallel ranks of the destination: each rank's pool gets its share of each page.

Page numbers are the same in all pools of a group, and rank 0's page table tells of all of them: a page has one
generation, whatever rank is looked at, because the group's scheduler hands it out once. So a grant covers the pages of
all ranks, each rank's bytes are copied while rank 0's generations are compared before and after, and the copy has ended
when the last rank's has; it has failed when one has.

Between groups of equal size rank r is copied from rank r, whole pages at once, by whatever transport. Between unequal
sizes pages are cut by heads (`kvstore/transfer/plan.py`), a few pages at a time, because the pieces are many; only in
the memory of one host is that done, elsewhere it is refused as `unequal_ranks`.

Used by `actor.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.errors import TransferError
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import PagePool
from kvstore.transfer.base import Peer
from kvstore.transfer.paired.orders import RemotePeer
from kvstore.transfer.plan import coalesce, head_copies, map_heads, page_descriptors, strided_descriptors
from kvstore.transfer.puller import Cut, Ended, Target
from kvstore.transfer.session import CopyEnded, StartCopy
from nodes.kv_agent.pullers import Pullers

UNEQUAL_RANKS: Final = "unequal_ranks"
MAX_PIECES: Final = 4096
"""Pieces of pages that are lined up at once: planning them takes some milliseconds of the agent's loop."""


class _Part(NamedTuple):
    """A share of a copy: from one source pool into one of the destination's."""

    target: Target
    peer: Peer
    copy: StartCopy
    cut: Cut


class _Pull:
    """What is left of a copy."""

    __slots__ = ("error", "num_bytes", "num_running", "parts")

    def __init__(self, parts: Iterator[_Part]) -> None:
        self.parts = parts
        self.num_running = 0
        self.num_bytes = 0
        self.error: CopyEnded | None = None


class RankPulls:
    """Copies between groups, each made of those between its ranks."""

    def __init__(self, puller: Pullers) -> None:
        self._puller = puller
        self._targets: dict[str, list[Target]] = {}
        self._pulls: dict[tuple[str, int], _Pull] = {}

    def add(self, group: str, pools: Sequence[PagePool]) -> None:
        """Register the pools of one of the agent's own groups, by rank."""
        targets = [self._puller.target(pool) for pool in pools]
        self._targets[group] = [target._replace(table=targets[0].table) for target in targets]

    def __contains__(self, group: str) -> bool:
        return group in self._targets

    def remove(self, group: str) -> None:
        """Give up the pools of a group; nothing is copied into them any more, nor sent from them."""
        self._targets.pop(group, None)
        self._puller.withdraw(group)

    def withdraw(self, group: str) -> None:
        """Send nothing more of a group's pools to other agents, see `is_sending`. `add` offers them again."""
        self._puller.withdraw(group)

    def is_sending(self, group: str) -> bool:
        """Whether pages of a group's pools are still being read for other agents."""
        return self._puller.is_sending(group)

    def start(self, grant_id: str, copy: StartCopy, group: str, source: Sequence[Peer]) -> Ended | None:
        """Begin a copy from a source's pools, by rank; its end comes from `pump`, or at once if it cannot begin."""
        targets = self._targets[group]
        if len(targets) == len(source) == 1:
            return self._puller.start(grant_id, copy, targets[0], source[0])
        if (why := _refusal(group, targets, source)) is not None:
            return Ended(grant_id, CopyEnded(copy.copy_id, *why), 0)
        parts = _equal_parts if len(targets) == len(source) else _unequal_parts
        pull = self._pulls[grant_id, copy.copy_id] = _Pull(parts(copy, targets, source))
        for _ in targets:
            self._next(grant_id, copy.copy_id, pull)
        return self._ended(grant_id, copy.copy_id, pull)

    def cancel(self, grant_id: str, copy_id: int) -> None:
        """End a copy early, at all ranks; its end still comes from `pump`."""
        pull = self._pulls.get((grant_id, copy_id))
        if pull is not None and pull.error is None:
            pull.error = CopyEnded(copy_id, "cancelled", "the transfer was cancelled")
        self._puller.cancel(grant_id, copy_id)

    def pump(self, now: float) -> Iterable[Ended]:
        """Let the transports work for a moment; the copies that ended at all ranks."""
        for ended in self._puller.pump(now):
            copy_id = ended.event.copy_id
            pull = self._pulls.get((ended.grant_id, copy_id))
            if pull is None:
                yield ended
                continue
            pull.num_running -= 1
            self._take(ended, pull)
            self._next(ended.grant_id, copy_id, pull)
            if (whole := self._ended(ended.grant_id, copy_id, pull)) is not None:
                yield whole

    def _next(self, grant_id: str, copy_id: int, pull: _Pull) -> None:
        """Begin the next part, unless one has failed already: then the others end soon, too."""
        part = None if pull.error is not None else next(pull.parts, None)
        if part is None:
            return
        ended = self._puller.start(grant_id, part.copy, part.target, part.peer, part.cut)
        if ended is None:
            pull.num_running += 1
        else:
            self._take(ended, pull)
        if pull.error is not None:
            self._puller.cancel(grant_id, copy_id)

    def _take(self, ended: Ended, pull: _Pull) -> None:
        pull.num_bytes += ended.num_bytes
        if ended.event.code and pull.error is None:
            pull.error = ended.event
            self._puller.cancel(ended.grant_id, ended.event.copy_id)

    def _ended(self, grant_id: str, copy_id: int, pull: _Pull) -> Ended | None:
        if pull.num_running:
            return None
        del self._pulls[grant_id, copy_id]
        return Ended(grant_id, pull.error or CopyEnded(copy_id), pull.num_bytes)


def _refusal(group: str, targets: Sequence[Target], source: Sequence[Peer]) -> tuple[str, str] | None:
    """Why the pools of these ranks cannot be copied to those."""
    if len(targets) == len(source):
        return None
    is_on_host = all(one.info.device == CPU for one in (*source, *(target.pool for target in targets)))
    if is_on_host and not any(isinstance(peer, RemotePeer) for peer in source):
        return None
    between = f"{len(source)} ranks of {source[0].info.group} to {len(targets)} of {group}"
    return UNEQUAL_RANKS, f"pages of {between} would be cut by heads, which is done in one host's memory only"


def _equal_parts(copy: StartCopy, targets: Sequence[Target], source: Sequence[Peer]) -> Iterator[_Part]:
    """Rank by rank, whole pages."""
    runs = coalesce(copy.source_pages, copy.pages)
    for target, peer in zip(targets, source, strict=True):
        yield _Part(target, peer, copy, Cut(page_descriptors(runs, target.pool.layout.page_bytes), source[0]))


def _unequal_parts(copy: StartCopy, targets: Sequence[Target], source: Sequence[Peer]) -> Iterator[_Part]:
    """A few pages at a time, the heads that each rank has from each rank of the source."""
    layout = targets[0].pool.layout
    num_pages = max(1, MAX_PIECES // (layout.num_layers * 2 * layout.page_size))
    for at in range(0, len(copy.pages), num_pages):
        share = copy._replace(
            source_pages=copy.source_pages[at : at + num_pages],
            source_generations=copy.source_generations[at : at + num_pages],
            pages=copy.pages[at : at + num_pages],
            generations=copy.generations[at : at + num_pages],
        )
        runs = coalesce(share.source_pages, share.pages)
        for target in targets:
            own = target.pool.layout
            for piece in map_heads(len(source), own, own.model_kv_heads):
                peer = source[piece.source_rank]
                parts = list(strided_descriptors(runs, head_copies(peer.info.layout, own, piece)))
                yield _Part(target, peer, share, Cut(parts, source[0]))


def require_ranks(pools: Sequence[Peer]) -> None:
    """Raises TransferError unless these are the pools of all ranks of one making of one group, in order."""
    first = pools[0].info
    for rank, peer in enumerate(pools):
        info = peer.info
        if (info.incarnation, info.num_pages) != (first.incarnation, first.num_pages):
            raise TransferError("source_changed", f"the pools of {first.group} are being made again")
        if (info.layout.tp_rank, info.layout.tp_size) != (rank, len(pools)):
            found = f"rank {info.layout.tp_rank} of {info.layout.tp_size}"
            raise TransferError(
                "bad_answer", f"rank {rank} of {len(pools)} of {first.group} was asked for, not {found}"
            )
