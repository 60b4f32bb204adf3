"""Pages between pools of one host: the destination's agent copies from the source pool, mapped read-only.

One copy by memcpy, in the loop's own thread, `quantum_bytes` for each `poll`: a loop that copies is never more than
one quantum away from its next message, and nothing is handed over between threads. Several transfers take turns. The
same code moves simulated pools.
"""

from collections import deque
from typing import Final

from kvstore.errors import PagesElsewhere, PoolClosed, TransferError
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Peer, Transfer, Transport
from kvstore.transfer.mapped.peer import MappedPeer

# 2 MiB take 0.2 to 0.4 ms, 1 ms on a busy host; larger pieces are not copied any faster.
DEFAULT_QUANTUM_BYTES: Final = 2 << 20


class _Copy:
    """What is left of a transfer."""

    __slots__ = ("destination", "parts", "position", "source", "transfer")

    def __init__(self, transfer: Transfer, source: memoryview) -> None:
        self.transfer = transfer
        self.source = source
        self.destination = transfer.pool.pages_view
        self.parts = deque(transfer.parts)
        self.position = 0


class ShmTransport(Transport):
    """Between pools that this process can map: `poll` does the work itself, `quantum_bytes` at a time."""

    name = "shm"
    kinds = frozenset({CPU})
    cuts_pages = True

    def __init__(self, host: MemoryHost, quantum_bytes: int = DEFAULT_QUANTUM_BYTES) -> None:
        self._host = host
        self._quantum_bytes = quantum_bytes
        self._peers: list[MappedPeer] = []
        self._posted: deque[_Copy] = deque()

    @property
    def num_posted(self) -> int:
        """Copies that have not ended."""
        return len(self._posted)

    def register(self, pool: PagePool) -> None:
        """Raises PagesElsewhere for a pool that does not lie in host memory."""
        _require_host(pool)

    def connect(self, handle: PoolHandle) -> MappedPeer:
        """Map a pool read-only."""
        pool = self._host.open(handle.path, writable=False)
        try:
            _require_host(pool)
        except PagesElsewhere:
            pool.close()
            raise
        peer = MappedPeer(pool, self)
        self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """End its copies and unmap the pool."""
        for copy in self._posted:
            if copy.transfer.peer is peer:
                copy.transfer.fail("source_lost", f"the pool of {peer.info.group} was given up")
        for known in self._peers:
            if known is peer:
                known.pool.close()
        self._peers = [known for known in self._peers if known is not peer]

    def post(self, transfer: Transfer) -> None:
        """Raises TransferError `unsupported` for a pool that this transport has not opened, `bad_descriptor`."""
        if not isinstance(transfer.peer, MappedPeer):
            raise TransferError("unsupported", f"{self.name} only reads from pools that it has mapped itself")
        transfer.require_inside()
        self._posted.append(_Copy(transfer, transfer.peer.pool.pages_view))

    def poll(self, now: float) -> list[Transfer]:
        """Copies at most one quantum, so it takes a millisecond or so."""
        ended: list[Transfer] = []
        # A bound in bytes, not in copies: runs of pages are of very different sizes, and the agent's loop waits for all
        # of it.
        budget = self._quantum_bytes
        for _ in range(len(self._posted)):
            copy = self._posted.popleft()
            transfer = copy.transfer
            if now >= transfer.deadline:
                transfer.fail("deadline_exceeded", f"{len(copy.parts)} runs of pages were not copied yet")
            if transfer.error is None and budget > 0:
                budget -= self._advance(copy, budget)
            if transfer.error is not None or not copy.parts:
                ended.append(transfer)
            else:
                self._posted.append(copy)
        # Whoever had this quantum comes last for the next.
        self._posted.rotate(-1)
        return ended

    def cancel(self, transfer: Transfer) -> None:
        """Copy nothing more of it."""
        if any(copy.transfer is transfer for copy in self._posted):
            transfer.fail("cancelled", "the transfer was cancelled")

    def drain(self) -> list[Transfer]:
        """Copies run only inside `poll`, so forgetting them is enough."""
        ended = [copy.transfer for copy in self._posted]
        for transfer in ended:
            self.cancel(transfer)
        self._posted.clear()
        return ended

    def close(self) -> None:
        """Drain, and unmap every pool."""
        self.drain()
        for peer in self._peers:
            peer.pool.close()
        self._peers.clear()

    @staticmethod
    def _advance(copy: _Copy, budget: int) -> int:
        """Copy up to `budget` bytes of one transfer; returns how many it took."""
        source, destination = copy.source, copy.destination
        done = 0
        try:
            while copy.parts and done < budget:
                local, remote, num_bytes = copy.parts[0]
                start = copy.position
                # Runs are cut inside a page where they must: one page of a large model alone may exceed the quantum.
                size = min(num_bytes - start, budget - done)
                destination[local + start : local + start + size] = source[remote + start : remote + start + size]
                done += size
                copy.position = start + size
                if copy.position == num_bytes:
                    copy.parts.popleft()
                    copy.position = 0
        except ValueError:
            # The view was released: its pool was closed under the transfer.
            copy.transfer.fail(PoolClosed.code, "a pool was closed while its pages were copied")
        copy.transfer.num_bytes += done
        return done


def _require_host(pool: PagePool) -> None:
    if pool.info.device != CPU:
        raise PagesElsewhere(f"the pages of {pool.path} lie on {pool.info.device}: `shm` copies in host memory only")
