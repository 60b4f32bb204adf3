"""Taking the agent's own pools into possession at start: what an earlier agent left is used again if it fits.

A pool on a device is always made again: its pages died with the agent that made them. One whose pages an operator has
had freed stays without them, whatever it lies on: see `memory.py`.

Called by `actor.py`, once for each configured pool, before the agent is ready.
"""

import asyncio
from typing import Final, NamedTuple

import msgspec

from kvstore.device import CPU
from kvstore.errors import DeviceExhaustedMemory, KVError, PoolForeign, PoolMismatch, PoolMissing, PoolTorn
from kvstore.page_pool import MemoryHost, PagePool, PoolInfo
from mesh.actor import Context
from nodes.kv_agent.config import PoolConfig

MEMORY_RETRY_S: Final = 0.25


class Possession(NamedTuple):
    """A pool that this agent owns now. `found`: `made`, `reopened`, `released`, or why it was replaced."""

    pool: PagePool
    found: str


def take_pool(host: MemoryHost, name: str, wanted: PoolConfig, incarnation: int) -> Possession:
    """Reopen the segment called `name` if it is sound and as configured, keeping its content and incarnation.

    Otherwise it is made again under `incarnation`. Raises PoolBusy (its owner lives), PoolDenied (another user's),
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
            return Possession(pool, "released" if pool.info.is_freed else "reopened")
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
        is_in_worker=wanted.in_worker,
    )
    if released is not None:
        unwanted = released.is_unwanted
        info = msgspec.structs.replace(info, weights=released.weights, is_unwanted=unwanted, is_freed=unwanted)
    return Possession(host.create(name, info), found)


async def take_when_free(ctx: Context, host: MemoryHost, name: str, wanted: PoolConfig, wait_s: float) -> Possession:
    """`take_pool`, again and again while its device is full: who maps pages of a dead agent is just ending."""
    deadline = ctx.now() + wait_s
    while True:
        try:
            return take_pool(host, name, wanted, ctx.address.epoch)
        except DeviceExhaustedMemory as error:
            if ctx.now() >= deadline:
                raise
            ctx.log.info("waiting for memory", group=wanted.group, why=error.message)
            await asyncio.sleep(MEMORY_RETRY_S)


def free_pool(host: MemoryHost, name: str, pool: PagePool) -> PagePool:
    """Free the pages of an own pool that is marked as unwanted. Returns what is left of it, which is this agent's too.

    Nobody may use the pages any more. Raises DeviceError.
    """
    pool.close()
    return host.create(name, msgspec.structs.replace(pool.info, ipc_handle=b"", is_freed=True))


def make_pool(host: MemoryHost, name: str, freed: PagePool, incarnation: int) -> tuple[PagePool, KVError | None]:
    """Make a freed pool again, as `incarnation`: the pool; or what was left of it, as before, and why it cannot be."""
    info = msgspec.structs.replace(freed.info, incarnation=incarnation, weights="", is_unwanted=False, is_freed=False)
    # The lock is given up for the file that takes the place of this one.
    freed.close()
    try:
        return host.create(name, info), None
    except KVError as error:
        return host.open(host.path(name), writable=True, own=True), error


def _difference(info: PoolInfo, wanted: PoolConfig) -> PoolMismatch | None:
    for name in ("group", "num_pages", "layout", "device"):
        found, asked = getattr(info, name), getattr(wanted, name)
        if found != asked:
            return PoolMismatch(f"it has {name} {found}, configured is {asked}")
    if info.device != CPU and not info.is_freed:
        return PoolMismatch(f"its pages on {info.device} died with the agent that made it")
    return None
