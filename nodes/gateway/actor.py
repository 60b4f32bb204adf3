"""The gateway process: clients over HTTP on one side, the mesh on the other. `requests/core.py` decides."""

from pathlib import Path

from typing_extensions import override

from mesh.actor import Call
from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.config import GatewayConfig
from nodes.gateway.http.authorization import Authorization
from nodes.gateway.http.bodies import BodyBudget
from nodes.gateway.http.connection import Served
from nodes.gateway.http.server import HttpServer, bind
from nodes.gateway.local import LocalGateway
from nodes.gateway.page.feed import MeshFeed
from nodes.gateway.routes.app import GatewayApp
from nodes.gateway.shown.scrape import Scraper
from nodes.gateway.surfaces.responses.kept import KeptResponses
from nodes.protocol import ReadResponse, ResponseIs


class Gateway(LocalGateway):
    """Owns client connections beside the request log."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self.server: HttpServer | None = None
        self._kept: KeptResponses | None = None
        self._feed: MeshFeed | None = None
        self._bodies = BodyBudget(config)

    @property
    def port(self) -> int:
        """Where HTTP is served; 0 before the start."""
        return 0 if self.server is None else self.server.port

    @override
    async def start(self) -> None:
        """Raises `mesh.errors.BindError`, `nodes.api_keys.entries.BadApiKeys`."""
        await super().start()
        config = self.config
        keys = Authorization(Path(config.api_key_file), self.ctx) if config.api_key_file else None
        listener = bind(config)
        scraper = Scraper(self.ctx, config)
        observer = HttpObserver(self.ctx)
        if config.responses_store_bytes:
            self._kept = KeptResponses(self.ctx, config)
        if config.page:
            self._feed = MeshFeed(self.ctx, self.service, keys)
        app = GatewayApp(self.service, scraper, observer, keys, self._kept, self._feed)
        self.server = HttpServer(Served(app, self._bodies), listener, config.max_connections, observer.refused)
        self.server.start()
        host = f"[{config.host}]" if ":" in config.host else config.host
        if keys is not None:
            keys.start()
        self.ctx.announce(url=f"http://{host}:{self.server.port}")

    @override
    def on_ask(self, call: Call) -> None:
        if isinstance(call.message, ReadResponse):
            if self._kept is None:
                call.reply(ResponseIs(is_there=False))
            else:
                self.ctx.spawn(self._kept.answer(call, call.message), name="read_response")
        else:
            super().on_ask(call)

    @override
    async def drain(self) -> None:
        """Finish what is here. With `reuse_port`, other gateways get new connections; else new calls get a 503."""
        shares_port = self.server is not None and self.config.reuse_port
        if self.server is not None and shares_port:
            self.server.leave_port()
        if self._feed is not None:
            # After the port was left: pages that ask again find another gateway.
            self._feed.end()
        if self.server is None or not shares_port:
            await super().drain()
            return
        self.service.door.begin_drain(turn_away=False)
        await self.server.quiet()
        await self.service.door.emptied()

    @override
    async def stop(self) -> None:
        if self._feed is not None:
            self._feed.end()
        await super().stop()
        if self.server is not None:
            await self.server.stop()
        if self._kept is not None:
            self._kept.close()

    @override
    def stats(self) -> dict[str, float]:
        if self._service is None:
            return {}
        return super().stats() | {
            "mesh_gateway_bodies": float(self._bodies.num_bodies),
            "mesh_gateway_body_bytes": float(self._bodies.num_bytes),
            "mesh_gateway_pages": float(self._feed.num_pages if self._feed is not None else 0),
        }
