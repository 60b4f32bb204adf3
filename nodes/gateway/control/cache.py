"""Forgets every cached prefix of the mesh, if nothing is under way that may need one.

    GET or POST /flush_cache --> a gateway --FlushCache--> every scheduler

A scheduler refuses while it has work; requests that no scheduler has yet are seen in what gateways say of themselves.
Where one refuses, others have forgotten theirs all the same: what is computed again is right, too.
"""

import asyncio
from typing import Final, NamedTuple

from mesh.actor import Context
from mesh.errors import CallError
from nodes.gateway.config import GatewayConfig
from nodes.gateway.control.memory import MemoryControl
from nodes.gateway.errors import BadRequest, Unavailable
from nodes.protocol import CacheFlushed, FlushCache
from nodes.protocol.control import BUSY
from nodes.roles import GATEWAY, SCHEDULER
from nodes.stats import ask_stats

_ASK_S: Final = 2.0
"""A scheduler answers between two of its turns, each of some milliseconds."""
_RUNNING, _WAITING = "mesh_gateway_requests_running", "mesh_gateway_requests_waiting"


class NotIdle(BadRequest):
    """Requests are under way. SGLang's status for it, which trainers wait out."""

    code = "not_idle"


class Load(NamedTuple):
    """Requests that gateways hold: those that a scheduler has, and those that wait for one or for their prompt."""

    num_running: int
    num_waiting: int


class CacheControl:
    """What one gateway has schedulers forget."""

    def __init__(self, ctx: Context, config: GatewayConfig, memory: MemoryControl) -> None:
        self._ctx = ctx
        self._config = config
        self._memory = memory

    async def load(self) -> Load:
        """Raises Unavailable if a gateway does not say."""
        gateways = {member.actor_id: member for member in self._ctx.members.by_role(GATEWAY, ready=False)}
        # It is among the members only once the registry has said so.
        gateways[self._ctx.address.actor_id] = self._ctx.describe()
        answers = await ask_stats(self._ctx, list(gateways.values()), self._config.scrape_timeout_s)
        told = [answer.stats.gauges for answer in answers if answer.stats is not None]
        if len(told) < len(answers):
            silent = ", ".join(answer.actor_id for answer in answers if answer.stats is None)
            raise self._unavailable(f"{silent} does not say whether it has requests")
        return Load(*(int(sum(gauges.get(name, 0.0) for gauges in told)) for name in (_RUNNING, _WAITING)))

    async def flush(self) -> int:
        """How many pages were freed. Raises NotIdle, Unavailable."""
        if num := sum(await self.load()):
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
