"""Forgets every cached prefix of the mesh, if nothing is under way that may need one.

    GET or POST /flush_cache --> a gateway --FlushCache--> every scheduler

A scheduler refuses while it has work; requests that no scheduler has yet are seen in what gateways say of themselves.
Where one refuses, others have forgotten theirs all the same: what is computed again is right, too.
"""

import asyncio
from typing import Final

from mesh.actor import Context
from mesh.errors import CallError
from nodes.gateway.config import GatewayConfig
from nodes.gateway.control.load import load_of_mesh
from nodes.gateway.control.memory import MemoryControl
from nodes.gateway.errors import BadRequest, Unavailable
from nodes.protocol import CacheFlushed, FlushCache
from nodes.protocol.control import BUSY
from nodes.roles import SCHEDULER

_ASK_S: Final = 2.0
"""A scheduler answers between two of its turns, each of some milliseconds."""


class NotIdle(BadRequest, code="not_idle"):
    """Requests are under way. SGLang's status for it, which trainers wait out."""


class CacheControl:
    """What one gateway has schedulers forget."""

    def __init__(self, ctx: Context, config: GatewayConfig, memory: MemoryControl) -> None:
        self._ctx = ctx
        self._config = config
        self._memory = memory

    async def flush(self) -> int:
        """How many pages were freed. Raises NotIdle, Unavailable."""
        load = await load_of_mesh(self._ctx, self._config)
        if load.silent:
            raise self._unavailable(f"{', '.join(load.silent)} does not say whether it has requests")
        if num := load.num_requests:
            raise NotIdle(f"The cache was not flushed: {num} requests are under way. Abort them, or try again later.")
        # Those that are not ready, too: one that starts again may find pages that the one before it has left.
        schedulers = self._ctx.members.by_role(SCHEDULER, ready=False)
        outcomes = await asyncio.gather(*(self._ask(one.actor_id) for one in schedulers))
        failures = {one.actor_id: out for one, out in zip(schedulers, outcomes, strict=True) if isinstance(out, str)}
        if failures:
            gone = {f"{SCHEDULER}-{group}" for group in await self._memory.groups_without_kv()}
            for actor_id, why in failures.items():
                if actor_id not in gone:
                    raise self._unavailable(f"{actor_id} cannot be told to flush its cache: {why}")
        return sum(out for out in outcomes if isinstance(out, int))

    async def _ask(self, actor_id: str) -> int | str:
        """The number of its pages, or why it did not answer. Raises NotIdle."""
        try:
            answer = (await self._ctx.ask(actor_id, FlushCache(), timeout_s=_ASK_S)).message
        except CallError as error:
            if error.code == BUSY:
                why = f"The cache was not flushed: {actor_id} has work under way. Try again later."
                raise NotIdle(why) from error
            return error.message
        return answer.num_pages if isinstance(answer, CacheFlushed) else "its answer does not match"

    def _unavailable(self, why: str) -> Unavailable:
        message = f"The cache was not flushed: {why}."
        return Unavailable(message, code="flush_failed", retry_after_s=self._config.retry_after_s)
