"""Takes possession of the agent's own pools at start: a pool that an earlier agent left is used again if it fits.

A pool on a device is always made again: its pages died with the agent that made them. A pool whose pages an operator
has had freed stays without them, wherever they were: see `memory/core.py`.

The pools of all tensor-parallel ranks of a group are of one incarnation: if one rank's is lost, all are.

Called by `actor.py`, once for each configured group, before the agent is ready.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvstore.errors import DeviceExhaustedMemory, KVError, PoolForeign, PoolMismatch, PoolMissing, PoolTorn
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import MemoryHost, PagePool, PoolInfo
from mesh.actor import Context
from nodes.kv_agent.config import PoolConfig

MEMORY_RETRY_S: Final = 0.25
"""A dying worker takes seconds to unmap a device's pages; four tries a second cost little, and add 0.25 s at most."""


class PoolAcquisition(NamedTuple):
    """A pool that this agent owns now. `found`: `made`, `reopened`, `released`, or why it was replaced."""

    pool: PagePool
    found: str


def take_group(host: MemoryHost, prefix: str, wanted: Sequence[PoolConfig], incarnation: int) -> list[PoolAcquisition]:
    """Take the pools of all ranks of a group; if one has to be made again, all are. Raises what `take_pool` raises.

    Nothing is held when it raises, but segments that were made stay for the next try.
    """
    taken: list[PoolAcquisition] = []
    try:
        # One by one: if one cannot be taken, those taken before it are given back.
        for config in wanted:
            pool = take_pool(host, prefix + config.name, config, incarnation)
            taken.append(pool)
        # One incarnation only: a rank's new pool would be empty where the others' page table says that pages are full.
        if len({acquired.pool.info.incarnation for acquired in taken}) > 1:
            for rank, config in enumerate(wanted):
                old = taken[rank].pool
                if old.info.incarnation != incarnation:
                    old.close()
                    host.unlink(old.path)
                    made = take_pool(host, prefix + config.name, config, incarnation)
                    taken[rank] = made._replace(found="replaced: the pool of another rank was lost")
        desired = next((acquired.pool.info for acquired in taken if acquired.pool.info.is_released), None)
        if desired is not None:
            # The previous agent may have died while it marked them.
            mark_pools(host, [acquired.pool for acquired in taken], desired.weights, is_unwanted=desired.is_unwanted)
    # Also if interrupted: pools that stay open keep their flocks, and the next try would find them taken.
    except BaseException:
        for acquired in taken:
            acquired.pool.close()
        raise
    return taken


def take_pool(host: MemoryHost, name: str, wanted: PoolConfig, incarnation: int) -> PoolAcquisition:
    """Reopen the segment called `name` if it is sound and as configured, keeping its content and incarnation.

    Otherwise it is made again as `incarnation`. Raises PoolBusy (its owner is alive), PoolDenied (another user's),
    PoolExhaustedMemory (of the host or the device), DeviceError, PoolMismatch (names too long for a header).
    """
    path = host.path(name)
    released: PoolInfo | None = None
    try:
        pool = host.open(path, writable=True, own=True)
    except PoolMissing:
        found = "made"
    except (PoolForeign, PoolTorn) as error:
        found = f"replaced: {error}"
    else:
        problem = _difference(pool.info, wanted)
        if problem is None:
            return PoolAcquisition(pool, "released" if pool.info.is_freed else "reopened")
        # An operator's release outlives a change of configuration: the new pool is released like the old one.
        released = pool.info if pool.info.is_released else None
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
    if released is not None:
        unwanted = released.is_unwanted
        info = msgspec.structs.replace(info, weights=released.weights, is_unwanted=unwanted, is_freed=unwanted)
    return PoolAcquisition(host.create(name, info), found)


async def take_when_free(
    ctx: Context, host: MemoryHost, prefix: str, wanted: Sequence[PoolConfig], wait_s: float
) -> list[PoolAcquisition]:
    """`take_group`, repeated while its device is full: processes that map a dead agent's pages are still ending."""
    deadline = ctx.now() + wait_s
    while True:
        try:
            return take_group(host, prefix, wanted, ctx.address.epoch)
        # Device memory is free only when every process has unmapped it, which takes a dying worker seconds.
        except DeviceExhaustedMemory as error:
            if ctx.now() >= deadline:
                raise
            ctx.log.info("waiting for memory", group=wanted[0].group, why=error.message)
            await asyncio.sleep(MEMORY_RETRY_S)


def mark_pools(host: MemoryHost, pools: Sequence[PagePool], weights: str, *, is_unwanted: bool) -> None:
    """Write into the headers of all ranks that they are released, or (`weights` empty) that they are not."""
    for pool in pools:
        pool.info = msgspec.structs.replace(pool.info, weights=weights, is_unwanted=is_unwanted)
        host.mark(pool.path, pool.info)


def free_pools(host: MemoryHost, prefix: str, pools: Sequence[PagePool]) -> list[PagePool]:
    """`free_pool` of all ranks that are not freed yet."""
    return [pool if pool.info.is_freed else free_pool(host, _name(prefix, pool), pool) for pool in pools]


def make_pools(
    host: MemoryHost, prefix: str, freed: Sequence[PagePool], incarnation: int
) -> tuple[list[PagePool], KVError | None]:
    """`make_pool` of all ranks, of one incarnation: all of them are made, or none is."""
    made: list[PagePool] = []
    for number, left in enumerate(freed):
        desired = left.info
        pool, problem = make_pool(host, _name(prefix, left), left, incarnation)
        if problem is not None:
            mark_pools(host, made, desired.weights, is_unwanted=desired.is_unwanted)
            return [*free_pools(host, prefix, made), pool, *freed[number + 1 :]], problem
        made.append(pool)
    return made, None


def _name(prefix: str, pool: PagePool) -> str:
    rank = pool.info.layout.tp_rank
    return f"{prefix}{pool.info.group}.{rank}" if rank else prefix + pool.info.group


def free_pool(host: MemoryHost, name: str, pool: PagePool) -> PagePool:
    """Returns what is left of a marked pool that nobody uses; this agent still owns it. Raises DeviceError."""
    pool.close()
    return host.create(name, msgspec.structs.replace(pool.info, ipc_handle=b"", is_freed=True))


def make_pool(host: MemoryHost, name: str, freed: PagePool, incarnation: int) -> tuple[PagePool, KVError | None]:
    """Make a freed pool again, as `incarnation`. Returns it; or what was left of it, as before, and why it failed."""
    info = msgspec.structs.replace(freed.info, incarnation=incarnation, weights="", is_unwanted=False, is_freed=False)
    # Release the lock for the file that replaces this one.
    freed.close()
    try:
        return host.create(name, info), None
    except KVError as error:
        return host.open(host.path(name), writable=True, own=True), error


def _difference(info: PoolInfo, wanted: PoolConfig) -> PoolMismatch | None:
    for name in ("group", "num_pages", "layout", "device"):
        found, asked = getattr(info, name), getattr(wanted, name)
        if found != asked:
            return PoolMismatch(f"its {name} is {found}, but {asked} is configured")
    if info.device != CPU and not info.is_freed:
        return PoolMismatch(f"its pages on {info.device} were lost with the agent that made it")
    return None
