"""Taking the agent's own pools into possession at start: what an earlier agent left is used again if it fits.

A pool on a device is always made again: its pages died with the agent that made them.

The pools of all tensor-parallel ranks of a group are of one making: what is lost of one rank is lost of all.

Called by `actor.py`, once for each configured group, before the agent is ready.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.device import CPU
from kvstore.errors import PoolForeign, PoolMismatch, PoolMissing, PoolTorn
from kvstore.page_pool import MemoryHost, PagePool, PoolInfo
from nodes.kv_agent.config import PoolConfig


class Possession(NamedTuple):
    """A pool that this agent owns now. `found` says how it began: `made`, `reopened`, or why it was replaced."""

    pool: PagePool
    found: str


def take_group(host: MemoryHost, prefix: str, wanted: Sequence[PoolConfig], incarnation: int) -> list[Possession]:
    """Take the pools of all ranks of a group; if one has to be made again, all are. Raises what `take_pool` raises.

    Nothing is held when it raises, but segments that were made stay for the next try.
    """
    taken: list[Possession] = []
    try:
        # One by one: those taken before one that cannot be are given back.
        for one in wanted:
            pool = take_pool(host, prefix + one.name, one, incarnation)
            taken.append(pool)
        if len({one.pool.info.incarnation for one in taken}) > 1:
            for rank, one in enumerate(wanted):
                old = taken[rank].pool
                if old.info.incarnation != incarnation:
                    old.close()
                    host.unlink(old.path)
                    made = take_pool(host, prefix + one.name, one, incarnation)
                    taken[rank] = made._replace(found="replaced: the pool of another rank was lost")
    except BaseException:
        for one in taken:
            one.pool.close()
        raise
    return taken


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
