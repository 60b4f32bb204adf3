"""The store as a source pool: a `Transport` that reads slots into an agent's pools, as others copy other pools' pages.

A slot is a page of this pool, and its sequence is the page's generation. So who takes pages out of a store needs
nothing of its own: `PagePuller` compares sequences before and after, and a slot that was given away is `stale_pages`.

A slot holds the page of all ranks, with one checksum over them, while a transfer is of one rank. The transfers of one
copy therefore begin when the last rank's is posted, and end together. Copies for which the store has no room now wait.

It also receives what becomes of writes, since a store tells one caller what has ended: `work` does that, for whoever
does not want ended transfers.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from typing_extensions import override

from kvstore.errors import PoolClosed, PoolMismatch, TransferError
from kvstore.pool.device import CPU
from kvstore.pool.header import PoolInfo
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import PoolHandle
from kvstore.store.interface import Store
from kvstore.store.operations import CORRUPT, FAILED, MEMORY_GONE, STALE, UNSIGNED, Read
from kvstore.store.pool_writes import PoolWrites
from kvstore.transfer.base import Peer, Transfer, Transport

DISK: Final = "disk"
INSTALLED: Final = "store"
"""Names of transports, for figures: from a disk, from a store of somebody else's."""
_CODES: Final = {
    STALE: "stale_pages", CORRUPT: "corrupt_pages", UNSIGNED: "unsigned_pages", FAILED: "read_failed",
    MEMORY_GONE: PoolClosed.code,
}  # fmt: skip
_PAUSE_S: Final = 0.05
"""Ends of reads wake the agent; without that only deadlines are looked at, which are seconds long."""


class StorePeer:
    """One rank's share of a store, as a pool that can be read."""

    def __init__(self, store: Store, info: PoolInfo, transport: "StoreTransport") -> None:
        self.info = info
        self.transport: Transport = transport
        self._store = store

    def generations(self, pages: Sequence[int]) -> list[int]:
        return self._store.sequences(pages)


class _Piece(NamedTuple):
    """One rank's transfer of a copy: its memory, page by page."""

    transfer: Transfer
    views: Sequence[memoryview]


class _Copy:
    """The transfers of one copy, by rank; `slots` and `sequences` are theirs in common."""

    def __init__(self, slots: Sequence[int], sequences: Sequence[int]) -> None:
        self.slots = slots
        self.sequences = sequences
        self.by_rank: dict[int, _Piece] = {}

    @property
    def is_whole(self) -> bool:
        return any(len(self.by_rank) == piece.transfer.peer.info.layout.tp_size for piece in self.by_rank.values())

    def fail(self, code: str, message: str) -> None:
        for piece in self.by_rank.values():
            piece.transfer.fail(code, message)


class StoreTransport(Transport):
    """Between a store and pools in host memory."""

    kinds = frozenset({CPU})

    def __init__(self, store: Store, writes: PoolWrites, name: str = DISK) -> None:
        self.name = name
        self._store = store
        self._writes = writes
        self._peers: list[StorePeer] = []
        # Those that lack a rank, or wait for room.
        self._gathering: list[_Copy] = []
        self._reading: dict[Read, _Copy] = {}
        self._ended: list[Transfer] = []

    @property
    @override
    def num_posted(self) -> int:
        copies = (*self._gathering, *self._reading.values())
        return sum(len(copy.by_rank) for copy in copies) + len(self._ended)

    @property
    @override
    def pause_s(self) -> float:
        return 0.0 if self._ended else _PAUSE_S

    @override
    def register(self, pool: PagePool) -> None:
        self.require_kind(pool.info.device, pool.path)

    @override
    def connect(self, handle: PoolHandle) -> StorePeer:
        """A rank's share, of the layout in `handle`. Raises PoolMismatch if the store has pages of another size."""
        layout = handle.layout
        wanted = layout.page_bytes * layout.tp_size, handle.num_pages
        if wanted != (self._store.page_bytes, self._store.num_slots):
            raise PoolMismatch(
                f"the store has {self._store.num_slots} pages of {self._store.page_bytes} bytes over all ranks, but "
                f"{handle.num_pages} of {layout.page_bytes} bytes at each of {layout.tp_size} ranks were asked for"
            )
        info = PoolInfo(group=handle.group, num_pages=wanted[1], layout=layout, incarnation=handle.incarnation)
        peer = StorePeer(self._store, info, self)
        self._peers.append(peer)
        return peer

    @override
    def disconnect(self, peer: Peer) -> None:
        self._stop("source_lost", "the store was disconnected", lambda transfer: transfer.peer is peer)
        self._peers = [other for other in self._peers if other is not peer]

    @override
    def post(self, transfer: Transfer) -> None:
        """Raises TransferError `source_lost`, or `bad_descriptor` for parts that are not the transfer's pages."""
        if not any(transfer.peer is peer for peer in self._peers):
            raise TransferError("source_lost", "the store is not connected")
        transfer.require_inside()
        slots, views = _pages_of(transfer)
        source = transfer.source
        if source is None or list(source.pages) != slots:
            raise TransferError("bad_descriptor", "the parts are not the pages of the transfer, in whole and in order")
        copy = self._copy_of(transfer, slots, source.generations)
        copy.by_rank[transfer.peer.info.layout.tp_rank] = _Piece(transfer, views)
        self._begin_gathered()

    @property
    def has_ended(self) -> bool:
        """Whether `poll` has transfers to return."""
        return bool(self._ended)

    def work(self, now: float) -> None:
        """Take in what the store has done, settle `writes`, and begin those and the copies that wait."""
        for ended in self._store.poll():
            if isinstance(ended, Read):
                self._settle(ended, self._reading.pop(ended))
            else:
                self._writes.settle(ended)
        self._writes.pump(now)
        self._stop("deadline_exceeded", "the disk had not read its pages", lambda transfer: now >= transfer.deadline)
        self._begin_gathered()

    @override
    def poll(self, now: float) -> list[Transfer]:
        self.work(now)
        over, self._ended = self._ended, []
        return over

    @override
    def cancel(self, transfer: Transfer) -> None:
        self._stop("cancelled", "the transfer was cancelled", lambda other: other is transfer)

    @override
    def drain(self) -> list[Transfer]:
        self._stop("cancelled", "the transfer was cancelled", lambda _: True)
        over = self.poll(0.0)
        # A read that the disk has begun cannot be called back.
        while self._reading:
            self._store.wait()
            over += self.poll(0.0)
        return over

    @override
    def close(self) -> None:
        self.drain()
        self._peers.clear()

    # inside

    def _copy_of(self, transfer: Transfer, slots: list[int], sequences: Sequence[int]) -> _Copy:
        """The first copy of these pages that lacks this rank; ranks of two that are alike may change places."""
        rank = transfer.peer.info.layout.tp_rank
        for copy in self._gathering:
            if rank not in copy.by_rank and (copy.slots, copy.sequences) == (slots, list(sequences)):
                return copy
        copy = _Copy(slots, list(sequences))
        self._gathering.append(copy)
        return copy

    def _begin_gathered(self) -> None:
        """Begin the copies that have all their ranks, in order, as far as the store takes them."""
        whole = [copy for copy in self._gathering if copy.is_whole]
        for copy in whole:
            by_rank = [copy.by_rank[rank].views for rank in sorted(copy.by_rank)]
            read = self._store.read(copy.slots, copy.sequences, list(zip(*by_rank, strict=True)))
            if read is None:
                # The others stay behind it, or a long prompt would wait for short ones without end.
                return
            self._gathering.remove(copy)
            self._reading[read] = copy

    def _settle(self, read: Read, copy: _Copy) -> None:
        wrong = [number for number, outcome in enumerate(read.outcomes) if outcome]
        for piece in copy.by_rank.values():
            piece.transfer.num_bytes = (len(read.slots) - len(wrong)) * len(piece.views[0])
            # What was read behind a wrong page cannot be used: a prompt's pages are good up to the first gap.
            piece.transfer.num_good = wrong[0] if wrong else len(read.slots)
        if wrong:
            slot, outcome = read.slots[wrong[0]], read.outcomes[wrong[0]]
            copy.fail(_CODES[outcome], f"slot {slot} of the store is {outcome}, as are {len(wrong) - 1} others")
        self._end(copy)

    def _stop(self, code: str, message: str, is_meant: Callable[[Transfer], bool]) -> None:
        """Fail transfers; copies that have not begun end with all their ranks, others when they have been read."""
        for copy in [*self._gathering, *self._reading.values()]:
            meant = [piece.transfer for piece in copy.by_rank.values() if is_meant(piece.transfer)]
            for transfer in meant:
                transfer.fail(code, message)
            if meant and copy in self._gathering:
                self._gathering.remove(copy)
                copy.fail(code, message)
                self._end(copy)
        for read, copy in self._reading.items():
            read.is_needed &= not any(is_meant(piece.transfer) for piece in copy.by_rank.values())

    def _end(self, copy: _Copy) -> None:
        self._ended += [piece.transfer for piece in copy.by_rank.values()]


def _pages_of(transfer: Transfer) -> tuple[list[int], list[memoryview]]:
    """Slots and memory of a transfer, page by page. Parts of pages are counted as the page they begin in."""
    memory, size = transfer.pool.pages_view, transfer.peer.info.layout.page_bytes
    slots: list[int] = []
    views: list[memoryview] = []
    for part in transfer.parts:
        for at in range(0, part.num_bytes, size):
            slot, inside = divmod(part.remote_offset + at, size)
            slots.append(-1 if inside or part.num_bytes % size else slot)
            views.append(memory[part.local_offset + at :][:size])
    return slots, views
