"""Moves pages between pools of one host: the destination's agent copies from the source pool, mapped read-only.

Copies are memcpy in the loop's own thread, `quantum_bytes` in each `poll`: a loop that copies is never more than one
quantum away from its next message, and nothing is handed over between threads. Several transfers take turns. The same
code moves simulated pools.
"""

from typing import Final

from kvstore.errors import PoolClosed
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import MemoryHost
from kvstore.transfer.base import Transfer
from kvstore.transfer.mapped.transport import MappedCopy, MappedTransport

# 2 MiB take 0.2 to 0.4 ms, 1 ms on a busy host; larger pieces are not copied any faster.
DEFAULT_QUANTUM_BYTES: Final = 2 << 20


class _Copy(MappedCopy):
    """What is left of a transfer: `position` bytes of its first part are copied."""

    __slots__ = ("destination", "position", "source")

    def __init__(self, transfer: Transfer, source: memoryview) -> None:
        super().__init__(transfer)
        self.source = source
        self.destination = transfer.pool.pages_view
        self.position = 0


class ShmTransport(MappedTransport[_Copy]):
    """Between pools that this process can map: `poll` does the work itself, `quantum_bytes` at a time."""

    name = "shm"
    kinds = frozenset({CPU})
    cuts_pages = True

    def __init__(self, host: MemoryHost, quantum_bytes: int = DEFAULT_QUANTUM_BYTES) -> None:
        super().__init__(host)
        self._quantum_bytes = quantum_bytes

    def post(self, transfer: Transfer) -> None:
        peer = self._require_own(transfer)
        self._posted.append(_Copy(transfer, peer.pool.pages_view))

    def poll(self, now: float) -> list[Transfer]:
        """Copies at most one quantum, so it takes a millisecond or so."""
        ended: list[Transfer] = []
        # A bound in bytes, not in copies: runs of pages differ widely in size, and the agent's loop waits meanwhile.
        budget = self._quantum_bytes
        for _ in range(len(self._posted)):
            copy = self._posted.popleft()
            transfer = copy.transfer
            if now >= transfer.deadline:
                transfer.fail("deadline_exceeded", f"{len(copy.parts)} runs of pages had not been copied")
            if transfer.error is None and budget > 0:
                budget -= self._advance(copy, budget)
            if transfer.error is not None or not copy.parts:
                ended.append(transfer)
            else:
                self._posted.append(copy)
        # The transfer that had this quantum comes last for the next.
        self._posted.rotate(-1)
        return ended

    @staticmethod
    def _advance(copy: _Copy, budget: int) -> int:
        source, destination = copy.source, copy.destination
        done = 0
        try:
            while copy.parts and done < budget:
                local, remote, num_bytes = copy.parts[0]
                start = copy.position
                # Runs are cut inside a page if need be: one page of a large model alone may exceed the quantum.
                size = min(num_bytes - start, budget - done)
                destination[local + start : local + start + size] = source[remote + start : remote + start + size]
                done += size
                copy.position = start + size
                if copy.position == num_bytes:
                    copy.parts.popleft()
                    copy.position = 0
        except ValueError:
            # The view was released: its pool was closed under the transfer.
            copy.transfer.fail(PoolClosed.code, "a pool was closed while its pages were being copied")
        copy.transfer.num_bytes += done
        return done
