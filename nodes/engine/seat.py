"""The gateway of an engine in its mesh: joins it, and has its routes answered in this process. On the engine's loop."""

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TextIO

import msgspec
from typing_extensions import override

from mesh.actor import Context
from mesh.address import Address
from mesh.membership.view import Member
from mesh.options import MAX_PEERS, SystemOptions
from mesh.runtime.process_limits import peers_that_fit
from mesh.runtime.run_directory import RunDirectory
from mesh.runtime.telemetry import LogSettings, log_to
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from nodes.engine.call import EngineCall
from nodes.engine.event_buffer import EventBuffer
from nodes.engine.startup import Begun
from nodes.gateway.answers.surface import Surface
from nodes.gateway.calls.completions import CompletionEndpoint
from nodes.gateway.calls.endpoint import answer
from nodes.gateway.calls.job_endpoint import JobEndpoint
from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.local import LocalGateway
from nodes.gateway.request_names import names_of
from nodes.gateway.shown.fingerprint import fingerprint_of
from nodes.gateway.surfaces.chat import CHAT
from nodes.gateway.surfaces.generate.surface import GENERATE

SURFACES: Final[tuple[Surface, ...]] = (CHAT, GENERATE)
"""The routes that generate which an engine asks, beside those for vectors."""
_RETRY_S: Final = 0.1
"""Between two looks for the registry of a mesh that is starting; a look is a `stat`."""


class _Route(NamedTuple):
    endpoint: JobEndpoint
    id_prefix: str


class Seat:
    """One incarnation of a gateway in a mesh. Raises `mesh.errors.MeshError` where it cannot be that."""

    def __init__(self, mesh: str, epoch: int, begun: Begun) -> None:
        self.config = config = msgspec.convert(begun.config, GatewayConfig, strict=False)
        run = RunDirectory.of_mesh(mesh)
        self._log_file = _open_log(run, begun.gateway)
        listen, host = ZeroMQOptions.of_host(run), run.host()
        options = SystemOptions(
            mesh=mesh,
            spec={} if host is None else host.spec,
            host=run.host_name(),
            proof=begun.proof,
            vet_host=listen.vet_host,
            log=log_to(self._log_file, LogSettings.from_environment(os.environ).level),
            retry_max_s=_RETRY_S,
            max_peers=peers_that_fit(MAX_PEERS),
        )
        self._gateway = _Gateway(config)
        address = Address(begun.gateway, epoch)
        self._system = ActorSystem(self._gateway, address, ZeroMQTransport(listen), run.bootstrap(), options)
        self._routes: dict[str, _Route] = {}

    @property
    def ctx(self) -> Context:
        return self._gateway.ctx

    async def join(self) -> None:
        await self._system.start()
        self._observer = _StrictObserver(self.ctx)
        self._routes = {surface.path: self._route_of(surface) for surface in SURFACES}
        await self._system.joined()

    def _route_of(self, surface: Surface) -> _Route:
        service, fingerprint = self._gateway.service, fingerprint_of(self.config)
        endpoint = CompletionEndpoint(service, surface, Validator(self.config), fingerprint=fingerprint)
        return _Route(endpoint, surface.id_prefix)

    def _route(self, path: str) -> _Route:
        if path not in self._routes:
            # Imported when one is asked for: numpy takes a tenth of a second, and programs that generate have no use
            # for it.
            from nodes.gateway.surfaces.vectors.endpoint import VectorEndpoint
            from nodes.gateway.surfaces.vectors.routes import VECTORS

            form = VECTORS[path]
            self._routes[path] = _Route(VectorEndpoint(self._gateway.service, form), form.id_prefix)
        return self._routes[path]

    @property
    def trouble(self) -> str:
        """What it waits for, to join or to be served."""
        missing = self._gateway.service.missing_roles() if self._routes else []
        return self.ctx.join_trouble or "; ".join(missing) or "its registry does not answer"

    async def served(self) -> None:
        """Return once every role is there that a request needs."""
        while self._gateway.service.missing_roles():
            self._gateway.changed.clear()
            await self._gateway.changed.wait()

    async def over(self) -> str:
        """Return, with the reason, if the mesh will not have this gateway any more."""
        reason = await self._system.shutdown_asked()
        return reason if self._system.over is None else self._system.over.message

    async def ask(
        self, path: str, body: bytes, events: EventBuffer, shown: Callable[[Any], Any] | None = None
    ) -> EngineCall:
        """Have a route answer a body. What is returned is over."""
        route = self._route(path)
        names = names_of({}, route.id_prefix, path)
        call = EngineCall(names, self._observer, body, self.config.max_body_bytes, events, shown)
        await answer(call, route.endpoint(call))
        return call

    async def leave(self) -> None:
        await self._system.stop()
        self._log_file.close()


class _Gateway(LocalGateway):
    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self.changed = asyncio.Event()

    @override
    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        super().on_members(joined, left, changed)
        self.changed.set()


class _StrictObserver(HttpObserver):
    """Over HTTP a field that nobody knows is passed over, since clients of others send theirs; here it is a mistake."""

    @override
    def unknown_fields(self, names: Iterable[str], path: str) -> None:
        for name in names:
            message = f"'{name}' is no field of {path}. Correct its name, or leave it out."
            raise BadRequest(message, param=name, code="unknown_field")


def _open_log(run: RunDirectory, actor_id: str) -> TextIO:
    try:
        return (run.path / "logs" / f"{actor_id}.log").open("a", buffering=1)
    except OSError:
        return open(os.devnull, "a")
