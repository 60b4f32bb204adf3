"""Pages between pools of one host: the destination's agent copies from the source pool, mapped read-only.

One copy by memcpy, in the loop's own thread, `quantum_bytes` for each `poll`: a loop that copies is never more than
one quantum away from its next message, and nothing is handed over between threads. Several transfers take turns. The
same code moves simulated pools.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.errors import PagesElsewhere, PoolClosed, TransferError
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import MemoryHost, PagePool, PoolInfo
from kvstore.transfer.base import Completion, Descriptor, Direction, Peer, SourcePages, require_inside

# 2 MiB take 0.2 to 0.4 ms, 1 ms on a busy host; larger pieces are not copied any faster.
DEFAULT_QUANTUM_BYTES: Final = 2 << 20


class MappedPeer:
    """A foreign pool, mapped read-only."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.info: PoolInfo = pool.info
        self._table = pool.table()

    def generations(self, pages: Sequence[int]) -> list[int]:
        """See `Peer`."""
        return self._table.peek_generations(pages)


class _Copy:
    """One posted transfer: what is left of it."""

    __slots__ = ("deadline", "destination", "error", "handle", "num_bytes", "parts", "peer", "position", "source")

    def __init__(self, handle: int, peer: MappedPeer, destination: memoryview, parts: Sequence[Descriptor]) -> None:
        self.handle = handle
        self.peer = peer
        self.source = peer.pool.pages_view
        self.destination = destination
        self.parts = deque(parts)
        self.position = 0
        self.num_bytes = 0
        self.deadline = 0.0
        self.error: TransferError | None = None


class ShmTransport:
    """`Transport` between pools that this process can map."""

    name = "shm"

    def __init__(self, host: MemoryHost, quantum_bytes: int = DEFAULT_QUANTUM_BYTES) -> None:
        self._host = host
        self._quantum_bytes = quantum_bytes
        self._regions: dict[int, PagePool] = {}
        self._peers: list[MappedPeer] = []
        self._posted: deque[_Copy] = deque()
        self._last_handle = 0

    @property
    def num_posted(self) -> int:
        """See `Transport`."""
        return len(self._posted)

    @property
    def pause_s(self) -> float:
        """See `Transport`: `poll` does the work itself."""
        return 0.0

    def register(self, pool: PagePool) -> int:
        """See `Transport`."""
        _require_host(pool)
        region = len(self._regions)
        self._regions[region] = pool
        return region

    def export(self, region: int) -> str:
        """See `Transport`: the segment's path."""
        return self._regions[region].path

    def connect(self, address: str) -> MappedPeer:
        """See `Transport`."""
        pool = self._host.open(address, writable=False)
        try:
            _require_host(pool)
        except PagesElsewhere:
            pool.close()
            raise
        peer = MappedPeer(pool)
        self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """See `Transport`."""
        for copy in self._posted:
            if copy.peer is peer:
                copy.error = TransferError("source_lost", f"the pool of {peer.info.group} was given up")
        for known in self._peers:
            if known is peer:
                known.pool.close()
        self._peers = [known for known in self._peers if known is not peer]

    def post(
        self,
        direction: Direction,
        region: int,
        peer: Peer,
        descriptors: Sequence[Descriptor],
        deadline: float,
        source: SourcePages | None = None,
    ) -> int:
        """See `Transport`. The source is mapped read-only, so there is no WRITE."""
        if direction is not Direction.READ or not isinstance(peer, MappedPeer):
            raise TransferError("unsupported", f"{self.name} only reads from pools that it has mapped itself")
        pool = self._regions[region]
        require_inside(descriptors, pool.info, peer.info)
        self._last_handle += 1
        copy = _Copy(self._last_handle, peer, pool.pages_view, descriptors)
        copy.deadline = deadline
        self._posted.append(copy)
        return copy.handle

    def poll(self, now: float) -> list[Completion]:
        """See `Transport`. Copies at most one quantum, so it takes a millisecond or so."""
        ended: list[Completion] = []
        budget = self._quantum_bytes
        for _ in range(len(self._posted)):
            copy = self._posted.popleft()
            if copy.error is None and now >= copy.deadline:
                copy.error = TransferError("deadline_exceeded", f"{len(copy.parts)} runs of pages were not copied yet")
            if copy.error is None and budget > 0:
                budget -= self._advance(copy, budget)
            if copy.error is not None or not copy.parts:
                ended.append(Completion(copy.handle, copy.num_bytes, copy.error))
            else:
                self._posted.append(copy)
        # Whoever had this quantum comes last for the next.
        self._posted.rotate(-1)
        return ended

    def cancel(self, handle: int) -> None:
        """See `Transport`."""
        for copy in self._posted:
            if copy.handle == handle and copy.error is None:
                copy.error = TransferError("cancelled", "the transfer was cancelled")

    def drain(self) -> list[Completion]:
        """See `Transport`. Copies run only inside `poll`, so forgetting them is enough."""
        for copy in self._posted:
            self.cancel(copy.handle)
        ended = [Completion(copy.handle, copy.num_bytes, copy.error) for copy in self._posted]
        self._posted.clear()
        return ended

    def close(self) -> None:
        """See `Transport`."""
        self.drain()
        for peer in self._peers:
            peer.pool.close()
        self._peers.clear()
        self._regions.clear()

    @staticmethod
    def _advance(copy: _Copy, budget: int) -> int:
        """Copy up to `budget` bytes of one transfer; returns how many it took."""
        source, destination = copy.source, copy.destination
        done = 0
        try:
            while copy.parts and done < budget:
                local, remote, num_bytes = copy.parts[0]
                start = copy.position
                size = min(num_bytes - start, budget - done)
                destination[local + start : local + start + size] = source[remote + start : remote + start + size]
                done += size
                copy.position = start + size
                if copy.position == num_bytes:
                    copy.parts.popleft()
                    copy.position = 0
        except ValueError:
            # The view was released: its pool was closed under the transfer.
            copy.error = TransferError(PoolClosed.code, "a pool was closed while its pages were copied")
        copy.num_bytes += done
        return done


def _require_host(pool: PagePool) -> None:
    if pool.info.device != CPU:
        raise PagesElsewhere(f"the pages of {pool.path} lie on {pool.info.device}: `shm` copies in host memory only")
