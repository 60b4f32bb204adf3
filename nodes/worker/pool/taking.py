"""How a worker gets its pool from the agent."""

import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.errors import PoolReleased
from kvstore.pool.mapping import map_pool
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import MapPool, PoolHandle
from mesh.actor import Context
from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import CallError
from nodes.model_spec import ModelSpec
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import LayoutMismatch

_MAP_TIMEOUT_S: Final = 5.0
"""An agent answers at once if it has the pool; the ask is repeated until it does."""


async def wait_for_pool(
    ctx: Context,
    asks: PersistentAsk,
    host: MemoryHost,
    config: WorkerConfig,
    spec: ModelSpec,
    refused: Callable[[CallError], None],
) -> PagePool:
    """Map the pool once there is one; until then `refused` gets errors.

    Raises CallErrors that a retry does not cure, and what `take_pool` raises, except PoolReleased.
    """
    question = MapPool(group=config.group, rank=config.tp_rank)
    while True:
        handle = await asks.ask(ctx, config.agent, question, timeout_s=_MAP_TIMEOUT_S, what="the pool", refused=refused)
        # The memory was released while the answer was on its way; the next answer will say so.
        with contextlib.suppress(PoolReleased):
            return take_pool(host, config, spec, handle)


def take_pool(host: MemoryHost, config: WorkerConfig, spec: ModelSpec, handle: PoolHandle) -> PagePool:
    """Map the pool. Raises LayoutMismatch if it was made for another model, and PoolError."""
    wanted = spec.kv_layout(config.dtype, config.page_size, config.tp_rank, config.tp_size)
    if handle.layout != wanted and msgspec.structs.replace(handle.layout, fingerprint=wanted.fingerprint) == wanted:
        raise LayoutMismatch(
            f"{config.agent} has made the pool of {config.group} for other weights ({handle.layout.fingerprint}) than"
            f" {config.model} has now ({wanted.fingerprint}). Restore those, or start the mesh again to serve these."
        )
    if handle.layout != wanted:
        raise LayoutMismatch(
            f"{config.agent} has made the pool of {config.group} for {handle.layout}, but {config.model} needs"
            f" {wanted}. Give agent, scheduler and worker of a group the same model, dtype, page size and ranks."
        )
    return map_pool(host, handle)
