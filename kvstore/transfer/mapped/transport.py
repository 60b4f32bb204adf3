"""What `shm` and `cuda_ipc` have in common: pools that are mapped read-only, and transfers that take turns.

A subclass makes its copies in `post`, moves them in `poll`, and decides in `_give_up` when a pool that nobody wants any
more is unmapped. Once a transfer has an error, nothing more of it is copied.
"""

from collections import deque
from typing import Generic, TypeVar

from kvstore.errors import TransferError
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Peer, Transfer, Transport
from kvstore.transfer.mapped.peer import MappedPeer


class MappedCopy:
    """A posted transfer, and its parts that are still to be copied, in order."""

    __slots__ = ("parts", "transfer")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.parts = deque(transfer.parts)


AnyCopy = TypeVar("AnyCopy", bound=MappedCopy)


class MappedTransport(Transport, Generic[AnyCopy]):
    """Between pools that this process can open at `host`; `poll` does the work."""

    def __init__(self, host: MemoryHost) -> None:
        self._host = host
        self._peers: list[MappedPeer] = []
        self._posted: deque[AnyCopy] = deque()

    @property
    def num_posted(self) -> int:
        return len(self._posted)

    def register(self, pool: PagePool) -> None:
        self.require_kind(pool.info.device, pool.path)

    def connect(self, handle: PoolHandle) -> MappedPeer:
        """Map a pool read-only. Raises PagesElsewhere, and what `MemoryHost.open` raises."""
        pool = self._host.open(handle.path, writable=False)
        try:
            # The header's device, not the handle's: the header decides where the pages are.
            self.require_kind(pool.info.device, pool.path)
            peer = MappedPeer(pool, self)
        except BaseException:
            # Also if interrupted: the caller has no pool to close.
            pool.close()
            raise
        self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """End its transfers with `source_lost`, and unmap the pool."""
        for copy in self._posted:
            if copy.transfer.peer is peer:
                copy.transfer.fail("source_lost", f"the pool of {peer.info.group} was disconnected")
        if isinstance(peer, MappedPeer) and peer in self._peers:
            self._peers.remove(peer)
            self._give_up(peer)

    def cancel(self, transfer: Transfer) -> None:
        if any(copy.transfer is transfer for copy in self._posted):
            transfer.fail("cancelled", "the transfer was cancelled")

    def drain(self) -> list[Transfer]:
        """Forgets what was posted: only `poll` copies."""
        ended = [copy.transfer for copy in self._posted]
        for transfer in ended:
            self.cancel(transfer)
        self._posted.clear()
        return ended

    def close(self) -> None:
        self.drain()
        for peer in list(self._peers):
            self.disconnect(peer)

    def _give_up(self, peer: MappedPeer) -> None:
        peer.pool.close()

    def _require_own(self, transfer: Transfer) -> MappedPeer:
        """The transfer's peer. Raises TransferError `unsupported` if it is another transport's, `bad_descriptor`."""
        # Another transport's peer has no mapping here to read from.
        if not isinstance(transfer.peer, MappedPeer):
            raise TransferError("unsupported", f"{self.name} only reads from pools that it has mapped itself")
        transfer.require_inside()
        return transfer.peer
