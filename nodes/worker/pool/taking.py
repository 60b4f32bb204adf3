"""How a worker gets its pool: from the agent, or with pages that it makes itself.

With `pool_in_worker` the agent gives a page table, the worker allocates the pages in its own process and exports them;
the agent opens them when it first copies. That saves the agent's CUDA context if nothing is copied, but the group's KV
is lost when the worker dies.
"""

import contextlib
from collections.abc import Callable

from kvstore.errors import PoolReleased
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.mapping import map_pool
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import MakePages, MapPool, OfferPages, PoolHandle
from mesh.actor import Context
from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import CallError
from nodes.model_spec import ModelSpec
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import BackendMissing, LayoutMismatch


async def wait_for_pool(
    ctx: Context,
    asks: PersistentAsk,
    host: MemoryHost,
    config: WorkerConfig,
    spec: ModelSpec,
    refused: Callable[[CallError], None],
) -> PagePool:
    """Map the pool, or its table if the pages are yet to be made, once there is one; until then `refused` gets errors.

    Raises CallErrors that a retry does not cure, and what `take_pool` raises, except PoolReleased.
    """
    question = (
        MakePages(group=config.group) if config.pool_in_worker else MapPool(group=config.group, rank=config.tp_rank)
    )
    while True:
        handle = await asks.ask(
            ctx, config.agent, question, timeout_s=config.map_timeout_s, what="the pool", refused=refused
        )
        # The memory was released while the answer was on its way; the next answer will say so.
        with contextlib.suppress(PoolReleased):
            return take_pool(host, config, spec, handle)


def take_pool(host: MemoryHost, config: WorkerConfig, spec: ModelSpec, handle: PoolHandle) -> PagePool:
    """Map the pool. Raises LayoutMismatch if it was made for another model, and PoolError."""
    wanted = spec.kv_layout(config.dtype, config.page_size, config.tp_rank, config.tp_size)
    if handle.layout != wanted:
        raise LayoutMismatch(
            f"{config.agent} has made the pool of {config.group} for {handle.layout}, but {config.model} needs"
            f" {wanted}. Give agent, scheduler and worker of a group the same model, dtype, page size and ranks."
        )
    return map_pool(host, handle)


async def make_pages(ctx: Context, asks: PersistentAsk, config: WorkerConfig, host: MemoryHost, pool: PagePool) -> None:
    """Make the pages of a table from `wait_for_pool`, and offer them to the agent.

    Raises DeviceError or BackendMissing.
    """
    if not isinstance(host, CudaHost):
        raise BackendMissing(
            f"pages of {config.group} are to be made on {config.device}, but this process uses no device"
        )
    offer = OfferPages(group=config.group, incarnation=pool.info.incarnation, ipc_handle=host.make_pages(pool))
    await asks.ask(ctx, config.agent, offer, timeout_s=config.map_timeout_s, what="the offer of pages")
