"""The gateway process: clients over HTTP on one side, the mesh on the other. Decides nothing; see `core.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.membership.view import Member
from mesh.transport.base import Buffer
from mesh.wire.codec import Codec
from nodes.gateway.authorization import Authorization
from nodes.gateway.bodies import BodyBudget
from nodes.gateway.config import GatewayConfig
from nodes.gateway.control.aborts import Aborts
from nodes.gateway.http import GatewayApp
from nodes.gateway.observer import HttpObserver
from nodes.gateway.scrape import Scraper
from nodes.gateway.server import HttpServer, bind
from nodes.gateway.service import DrawSeed, GatewayService, draw_secret_seed
from nodes.gateway.surfaces.responses.kept import KeptResponses
from nodes.protocol import (
    AbortRequests,
    AttemptFailed,
    Pooled,
    PromptRead,
    ReadResponse,
    RequestsAborted,
    ResponseIs,
    TextBatch,
)
from nodes.roles import GATEWAY, NODE_CODEC


class Gateway(Actor):
    """Owns client connections and the request log.

    Args:
        config: see `GatewayConfig`.
        serve_http: False in simulations, which drive `service` themselves.
        draw_seed: draws the seed of a call that brings none; a simulation passes a repeatable one.
    """

    role: ClassVar[str] = GATEWAY
    codec: ClassVar[Codec] = NODE_CODEC

    def __init__(
        self, config: GatewayConfig, *, serve_http: bool = True, draw_seed: DrawSeed = draw_secret_seed
    ) -> None:
        self._config = config
        self._draw_seed = draw_seed
        self._serve_http = serve_http
        self._service: GatewayService | None = None
        self.server: HttpServer | None = None
        self._kept: KeptResponses | None = None
        self._aborts: Aborts | None = None
        self._bodies = BodyBudget(config)

    @property
    def service(self) -> GatewayService:
        assert self._service is not None, "the gateway was used before it started"
        return self._service

    @property
    def port(self) -> int:
        """Where HTTP is served; 0 before the start and without HTTP."""
        return 0 if self.server is None else self.server.port

    async def start(self) -> None:
        """Raises `mesh.errors.BindError`, `nodes.api_keys.entries.BadApiKeys`."""
        service = self._service = GatewayService(self.ctx, self._config, self._draw_seed)
        self._aborts = Aborts(self.ctx, service)
        service.on_members(self.ctx.members.all())
        if self._serve_http:
            keys = Authorization(Path(self._config.api_key_file), self.ctx) if self._config.api_key_file else None
            listener = bind(self._config)
            scraper = Scraper(self.ctx, self._config)
            observer = HttpObserver(self.ctx)
            if self._config.responses_store_bytes:
                self._kept = KeptResponses(self.ctx, self._config)
            app = GatewayApp(service, scraper, observer, self._bodies, keys, self._kept)
            self.server = HttpServer(app, listener, self._config, self._bodies, observer.refused)
            await self.server.start()
            host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
            if keys is not None:
                keys.start()
            self.ctx.announce(url=f"http://{host}:{self.server.port}")

    def on_ask(self, call: Call) -> None:
        if isinstance(call.message, ReadResponse):
            if self._kept is None:
                call.reply(ResponseIs(is_there=False))
            else:
                self.ctx.spawn(self._kept.answer(call, call.message), name="read_response")
        elif isinstance(call.message, AbortRequests):
            # Before the start there is nothing to be aborted.
            call.reply(RequestsAborted(num=self._aborts.here(call.message) if self._aborts else 0))
        else:
            super().on_ask(call)

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        if isinstance(message, TextBatch | PromptRead | Pooled | AttemptFailed):
            self.service.handle(message)
        else:
            super().on_tell(sender, message, buffers)

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        if self._service is not None:
            self._service.on_peer_lost(peer.actor_id, peer.epoch)

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        if self._service is not None:
            self._service.on_members([*joined, *left, *changed])

    async def drain(self) -> None:
        """Finish what is here. With `reuse_port`, other gateways get new connections; else new calls get a 503."""
        if self.server is not None and self._config.reuse_port:
            self.server.leave_port()
            self.service.begin_drain(turn_away=False)
            await self.server.quiet()
        else:
            self.service.begin_drain(turn_away=True)
        await self.service.emptied()

    async def stop(self) -> None:
        if self._service is not None:
            self._service.stop()
        if self.server is not None:
            await self.server.stop()
        if self._kept is not None:
            self._kept.close()

    def stats(self) -> dict[str, float]:
        if self._service is None:
            return {}
        core = self._service.core
        return {
            "mesh_gateway_bodies": float(self._bodies.num_bodies),
            "mesh_gateway_body_bytes": float(self._bodies.num_bytes),
            "mesh_gateway_calls_inflight": float(self._service.num_calls),
            "mesh_gateway_requests_running": float(core.num_requests - core.num_waiting),
            "mesh_gateway_requests_waiting": float(core.num_waiting),
            "mesh_gateway_cancels_inflight": float(core.num_cancels),
            "mesh_gateway_retries_total": float(core.num_retries),
            "mesh_gateway_resends_total": float(core.resends.num_resends),
            "mesh_gateway_stale_outputs_total": float(core.num_refused),
            "mesh_numerics_changes_total": float(core.num_numerics_changes),
        }
