"""Taking the agent's own pools into possession at start: what an earlier agent left is used again if it fits.

A pool on a device is always made again: its pages died with the agent that made them.

Called by `actor.py`, once for each configured pool, before the agent is ready.
"""

from typing import NamedTuple

from kvstore.device import CPU
from kvstore.errors import PoolForeign, PoolMismatch, PoolMissing, PoolTorn
from kvstore.page_pool import MemoryHost, PagePool, PoolInfo
from nodes.kv_agent.config import PoolConfig


class Possession(NamedTuple):
    """A pool that this agent owns now. `found` says how it began: `made`, `reopened`, or why it was replaced."""

    pool: PagePool
    found: str


def take_pool(host: MemoryHost, name: str, wanted: PoolConfig, incarnation: int) -> Possession:
    """Reopen the segment called `name` if it is sound and as configured, keeping its content and incarnation.

    Otherwise it is made again under `incarnation`. Raises PoolBusy (its owner lives), PoolDenied (another user's),
    PoolExhaustedMemory (of the host or the device), DeviceError, PoolMismatch (names too long for a header).
    """
    path = host.path(name)
    try:
        pool = host.open(path, writable=True, own=True)
    except PoolMissing:
        found = "made"
    except (PoolForeign, PoolTorn) as error:
        found = f"replaced: {error}"
    else:
        problem = _difference(pool.info, wanted)
        if problem is None:
            return Possession(pool, "reopened")
        pool.close()
        found = f"replaced: {problem}"
    host.unlink(path)
    info = PoolInfo(
        group=wanted.group,
        num_pages=wanted.num_pages,
        layout=wanted.layout,
        incarnation=incarnation,
        device=wanted.device,
    )
    return Possession(host.create(name, info), found)


def _difference(info: PoolInfo, wanted: PoolConfig) -> PoolMismatch | None:
    for name in ("group", "num_pages", "layout", "device"):
        found, asked = getattr(info, name), getattr(wanted, name)
        if found != asked:
            return PoolMismatch(f"it has {name} {found}, configured is {asked}")
    if info.device != CPU:
        return PoolMismatch(f"its pages on {info.device} died with the agent that made it")
    return None
