"""Asks every member of the mesh for its numbers, all at once and within one deadline."""

import asyncio
from collections.abc import Callable

from mesh.actor import Context
from mesh.errors import CallError
from mesh.frames import StatsReply, StatsRequest
from mesh.membership import Member
from nodes.gateway.config import GatewayConfig
from nodes.gateway.metrics import ActorStats, render


class Scraper:
    """Makes the page of `/metrics`; scrapes that come together share one round of asks."""

    def __init__(self, ctx: Context, config: GatewayConfig, own_stats: Callable[[], dict[str, float]]) -> None:
        self._ctx = ctx
        self._config = config
        self._own_stats = own_stats
        self._running: asyncio.Task[bytes] | None = None

    async def page(self) -> bytes:
        """The page as of now. An actor that does not answer in time is there with `mesh_actor_up` 0."""
        if self._running is None or self._running.done():
            self._running = self._ctx.spawn(self._scrape(), name="scrape")
        return await asyncio.shield(self._running)

    async def _scrape(self) -> bytes:
        members = self._ctx.members.all()
        answers = await asyncio.gather(*(self._ask(member) for member in members))
        return render(answers, self._config.model_name)

    async def _ask(self, member: Member) -> ActorStats:
        stats: StatsReply | None = None
        if member.actor_id == self._ctx.address.actor_id:
            stats = self._ctx.metrics.snapshot(self._own_stats())
        else:
            try:
                answer = await self._ctx.ask(member.actor_id, StatsRequest(), timeout_s=self._config.scrape_timeout_s)
            except CallError:
                answer = None
            if answer is not None and isinstance(answer.message, StatsReply):
                stats = answer.message
        return ActorStats(member.actor_id, member.role, member.epoch, stats)
