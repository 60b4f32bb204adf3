"""The current statistics of every member of the mesh, for `/metrics`."""

import asyncio

from mesh.actor import Context
from nodes.gateway.config import GatewayConfig
from nodes.gateway.shown.metrics import render
from nodes.stats import ActorStats, ask_stats


class Scraper:
    """Asks all members; scrapes that come together share one round of asks."""

    def __init__(self, ctx: Context, config: GatewayConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._running: asyncio.Task[list[ActorStats]] | None = None

    async def page(self) -> bytes:
        """An actor that does not answer in time appears with `mesh_actor_up` 0."""
        return render(await self.answers(), self._config.model_name)

    async def answers(self) -> list[ActorStats]:
        # Shared: otherwise several scrapers would each ask every actor of the mesh.
        if self._running is None or self._running.done():
            asks = ask_stats(self._ctx, self._ctx.members.all(), self._config.scrape_timeout_s)
            self._running = self._ctx.spawn(asks, name="scrape")
        # Shielded: one scraper that hangs up must not take the answers from the others.
        return await asyncio.shield(self._running)
