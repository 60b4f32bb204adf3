"""Maps the pool that an agent has named; the file at the path must be what the agent says.

Called by schedulers and workers, which compute on what they map: pages of another incarnation of the pool, or of
another model, would be found by the same hashes.
"""

from kvstore.errors import PoolMismatch, PoolReleased
from kvstore.pool.header import HANDLE_FIELDS
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import PoolHandle


def map_pool(host: MemoryHost, handle: PoolHandle) -> PagePool:
    """Map the pool of `handle` for writing. Raises PoolReleased, PoolMismatch, and what `MemoryHost.open` raises."""
    pool = host.open(handle.path, writable=True)
    if pool.info.is_released:
        pool.close()
        raise PoolReleased(f"{handle.path} was released after {handle.agent} named it; ask that agent again")
    for name in HANDLE_FIELDS:
        found, told = getattr(pool.info, name), getattr(handle, name)
        if found != told:
            pool.close()
            raise PoolMismatch(
                f"{handle.path} has {name} {found}, but {handle.agent} says {told}: it was recreated or belongs to"
                " another mesh: restart this actor, and give each mesh on a host its own --name"
            )
    return pool


def handle_of(pool: PagePool, agent: str = "") -> PoolHandle:
    """The handle by which a pool's agent describes it to others."""
    return PoolHandle(agent=agent, path=pool.path, **{name: getattr(pool.info, name) for name in HANDLE_FIELDS})
