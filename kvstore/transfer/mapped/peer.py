"""A foreign pool that this process has mapped. Used by `shm` and `cuda_ipc`."""

from collections.abc import Sequence

from kvstore.pool.page_pool import PagePool, PoolInfo
from kvstore.transfer.base import Transport


class MappedPeer:
    """A `Peer` whose pool is mapped read-only, with its page table."""

    def __init__(self, pool: PagePool, transport: Transport) -> None:
        self.pool = pool
        self.info: PoolInfo = pool.info
        self.transport = transport
        self._table = pool.table()

    def generations(self, pages: Sequence[int]) -> list[int]:
        return self._table.peek_generations(pages)
