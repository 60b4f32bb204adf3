"""One of the agent's own pools, as its core knows it."""

from typing import NamedTuple

from kvstore.layout import KVLayout
from kvstore.pool.device import CPU
from kvstore.pool.header import PoolInfo
from kvstore.protocol import PoolHandle


class Pool(NamedTuple):
    """The pool of a group, or of the tensor-parallel rank of it that its layout names."""

    group: str
    path: str
    num_pages: int
    layout: KVLayout
    incarnation: int
    device: str = CPU

    @classmethod
    def from_info(cls, path: str, info: PoolInfo) -> "Pool":
        return cls(info.group, path, info.num_pages, info.layout, info.incarnation, info.device)

    def handle(self, agent: str) -> PoolHandle:
        return PoolHandle(agent=agent, **self._asdict())
