"""The HTTP surface: which handler answers which path.

Starlette does the routing, except for the routes that stream, which bypass it: each layer around `send` costs time
for every token. Built by `actor.py` once its service is there.
"""

import time
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nodes.gateway.answers.surface import Surface
from nodes.gateway.calls.completions import CompletionEndpoint
from nodes.gateway.calls.endpoint import CLIENT_LEFT, Endpoint, Handler
from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.clients import ClientNames
from nodes.gateway.control.pages import NOT_YET, ControlPages, not_yet
from nodes.gateway.errors import (
    OPENAI_ERRORS,
    ApiError,
    BadRequest,
    ErrorForm,
    Internal,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnknownRoute,
    WrongMethod,
)
from nodes.gateway.fields.openai_types import DetokenizedText, ModelCard, ModelList, ServerLoad, Tokenized, Version
from nodes.gateway.fields.tool_fields import ToolUse
from nodes.gateway.http.authorization import Authorization
from nodes.gateway.http.bodies import BodyBudget
from nodes.gateway.http.call import HttpCall
from nodes.gateway.http.cors import CrossOrigin
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.page.feed import MeshFeed
from nodes.gateway.page.shell import HEADERS, PAGE
from nodes.gateway.request_names import names_of
from nodes.gateway.routes.codex_models import codex_model
from nodes.gateway.routes.docs_page import DOCS_PAGE
from nodes.gateway.routes.health import HealthPages
from nodes.gateway.routes.openapi import document
from nodes.gateway.service import GatewayService
from nodes.gateway.shown.fingerprint import fingerprint_of, server_version
from nodes.gateway.shown.metrics import CONTENT_TYPE
from nodes.gateway.shown.scrape import Scraper
from nodes.gateway.surfaces.chat import CHAT
from nodes.gateway.surfaces.generate.surface import GENERATE
from nodes.gateway.surfaces.messages.surface import MESSAGES
from nodes.gateway.surfaces.messages.types import TokensCount
from nodes.gateway.surfaces.responses.endpoint import ResponsePages, ResponsesEndpoint
from nodes.gateway.surfaces.responses.kept import KeptResponses
from nodes.gateway.surfaces.responses.surface import RESPONSES
from nodes.gateway.surfaces.text import TEXT
from nodes.gateway.surfaces.vectors.endpoint import VectorEndpoint
from nodes.gateway.surfaces.vectors.routes import VECTORS

SURFACES: Final[tuple[Surface, ...]] = (CHAT, TEXT, RESPONSES, MESSAGES, GENERATE)
"""The routes that generate."""
RESPONSE: Final = RESPONSES.path + "/{response_id}"
COUNT_TOKENS: Final = MESSAGES.path + "/count_tokens"
HTML = b"text/html; charset=utf-8"

OPEN: Final = frozenset(
    {
        "/health", "/health/live", "/health/ready", "/health/generate", "/ping", "/healthz", "/health_generate",
        "/metrics", "/api/hello", "/",
    }
)  # fmt: skip
"""Answered without an API key: what asks for these often cannot send one, and they say nothing of requests. The page
at `/` is empty until its script has a key.
"""


_WATCHED: Final = (BadRequest, TooManyRequests, Internal, Unavailable)
"""Whose counts begin at 0 where something is generated. With all statuses of all routes a page had 700 series more."""


def errors_of(path: str) -> ErrorForm:
    """How errors of a path are told: as its surface does, or the surface that it is below."""
    surfaces = (surface for surface in SURFACES if f"{path}/".startswith(f"{surface.path}/"))
    return next((surface.errors for surface in surfaces), OPENAI_ERRORS)


class Pages:
    """Handlers of all routes except completions and health."""

    def __init__(
        self,
        service: GatewayService,
        validator: Validator,
        scraper: Scraper,
        observer: HttpObserver,
        budget: BodyBudget,
    ) -> None:
        self._service = service
        self._config = service.config
        self._validator = validator
        self._scraper = scraper
        self._observer = observer
        self._version = server_version()
        self._openapi = document(self._version, self._config)
        self._created = int(time.time())
        self._budget = budget

    async def models(self, call: HttpCall) -> None:
        names, length = self._config.served_names, self._config.context_length
        models = [codex_model(name, priority, length) for priority, name in enumerate(names)]
        await call.respond(
            200, msgspec.json.encode(ModelList(data=[self._card(name) for name in names], models=models))
        )

    async def model(self, call: HttpCall) -> None:
        name = call.path_params["model_id"]
        if name not in self._config.served_names:
            raise UnknownModel(f"The model '{name[:200]}' does not exist.", param="model")
        await call.respond(200, msgspec.json.encode(self._card(name)))

    async def tokenize(self, call: HttpCall) -> None:
        body = await self._read(call)
        question, unknown_fields = self._validator.tokenize(body, call.request_id)
        self._observer.unknown_fields(unknown_fields, call.names.path)
        if question.tools is not None:
            (await self._service.tokenizers.form.get()).check_tools(ToolUse(question.tools))
        param = "prompt" if question.chat is None else "messages"
        prepared = await self._service.tokenizers.prepare(question, prompt_param=param)
        token_ids = prepared.token_ids[0]
        answer = Tokenized(count=len(token_ids), max_model_len=self._config.context_length, tokens=token_ids)
        await call.respond(200, msgspec.json.encode(answer))

    async def count_tokens(self, call: HttpCall) -> None:
        question, unknown_fields = MESSAGES.counted(self._validator, await self._read(call), call.request_id)
        self._observer.unknown_fields(unknown_fields, call.names.path)
        prepared = await self._service.tokenizers.prepare(question, prompt_param="messages")
        await call.respond(200, msgspec.json.encode(TokensCount(input_tokens=len(prepared.token_ids[0]))))

    async def detokenize(self, call: HttpCall) -> None:
        body, unknown_fields = self._validator.detokenize(await self._read(call))
        self._observer.unknown_fields(unknown_fields, call.names.path)
        skip = bool(body.skip_special_tokens)
        text = await self._service.tokenizers.detokenize(body.tokens, skip_special_tokens=skip)
        await call.respond(200, msgspec.json.encode(DetokenizedText(prompt=text)))

    async def metrics(self, call: HttpCall) -> None:
        await call.respond(200, await self._scraper.page(), content_type=CONTENT_TYPE)

    async def tokenizer_info(self, call: HttpCall) -> None:
        await call.respond(200, await self._service.tokenizers.info.get())

    async def load(self, call: HttpCall) -> None:
        await call.respond(200, msgspec.json.encode(ServerLoad(server_load=self._service.door.num_calls)))

    async def version(self, call: HttpCall) -> None:
        await call.respond(200, msgspec.json.encode(Version(version=self._version)))

    async def openapi(self, call: HttpCall) -> None:
        await call.respond(200, self._openapi)

    async def docs(self, call: HttpCall) -> None:
        await call.respond(200, DOCS_PAGE, content_type=HTML)

    async def page(self, call: HttpCall) -> None:
        await call.respond(200, PAGE, content_type=HTML, headers=HEADERS)

    async def _read(self, call: HttpCall) -> bytes:
        place = self._service.door.enter(call.client, call.key)
        try:
            return await call.read_body(self._budget)
        finally:
            call.forget_body()
            self._service.door.leave(place)

    def _card(self, name: str) -> ModelCard:
        config = self._config
        quantization = None if config.quantization == "none" else config.quantization
        return ModelCard(
            id=name,
            created=self._created,
            max_model_len=config.context_length,
            root=config.model,
            quantization=quantization,
        )


def _probed(health: HealthPages) -> dict[str, Handler]:
    """The health routes, also under the paths that probes use by default."""
    return {
        "/health/live": health.live,
        "/health/ready": health.ready,
        "/health/generate": health.generate,
        # Those of vLLM and SGLang, SageMaker, Kubernetes.
        "/health": health.ready,
        "/ping": health.ready,
        "/healthz": health.live,
        "/health_generate": health.generate,
        # Claude Code's.
        "/api/hello": health.live,
    }


def _generating(
    service: GatewayService,
    validator: Validator,
    observer: HttpObserver,
    budget: BodyBudget,
    kept: KeptResponses | None,
) -> dict[str, Handler]:
    fingerprint = fingerprint_of(service.config)
    handlers: dict[str, Handler] = {
        surface.path: CompletionEndpoint(
            service, surface, validator, fingerprint=fingerprint, budget=budget, observer=observer
        )
        for surface in SURFACES
    }
    handlers[RESPONSES.path] = ResponsesEndpoint(
        service, validator, kept, fingerprint=fingerprint, budget=budget, observer=observer
    )
    for path, form in VECTORS.items():
        handlers[path] = VectorEndpoint(service, form, budget=budget, observer=observer)
    return handlers


class GatewayApp:
    """The ASGI application of one gateway."""

    def __init__(
        self,
        service: GatewayService,
        scraper: Scraper,
        observer: HttpObserver,
        budget: BodyBudget,
        keys: Authorization | None = None,
        kept: KeptResponses | None = None,
        feed: MeshFeed | None = None,
    ) -> None:
        config, validator = service.config, Validator(service.config)
        pages, health = Pages(service, validator, scraper, observer, budget), HealthPages(service, validator)
        self._observer = observer
        for path in (*VECTORS, *(surface.path for surface in SURFACES)):
            failures = (errors_of(path).status(error("")) for error in _WATCHED)
            observer.serves(path, (200, CLIENT_LEFT, *failures))
        self._keys = keys
        clients = ClientNames(config.trusted_proxies, config.client_salt)
        surfaces: dict[str, Surface] = {surface.path: surface for surface in SURFACES}
        id_prefixes = {path: one.id_prefix for path, one in (surfaces | dict(VECTORS)).items()}

        def endpoint(path: str, handler: Handler) -> Endpoint:
            its_keys = None if path in OPEN else keys
            prefix = id_prefixes.get(path, "req-")
            return Endpoint(path, handler, observer, prefix, errors_of(path), its_keys, clients)

        responses = ResponsePages(kept)
        control = ControlPages(service, observer, budget, server_version())
        posts: dict[str, Handler] = {
            **_generating(service, validator, observer, budget, kept) | control.posts,
            COUNT_TOKENS: pages.count_tokens,
            RESPONSE + "/cancel": responses.cancel,
            "/tokenize": pages.tokenize,
            "/detokenize": pages.detokenize,
        }
        gets: dict[str, Handler] = {
            **({} if feed is None else {"/": pages.page, "/events/mesh": feed}),
            "/v1/models": pages.models,
            "/v1/models/{model_id:path}": pages.model,
            RESPONSE: responses.get,
            **_probed(health),
            "/metrics": pages.metrics,
            "/version": pages.version,
            "/load": pages.load,
            "/tokenizer_info": pages.tokenizer_info,
            **control.gets,
            "/openapi.json": pages.openapi,
            "/docs": pages.docs,
        }
        apps = {path: endpoint(path, handler) for path, handler in (posts | gets | control.either).items()}
        methods = {"POST": posts | control.either, "GET": gets | control.either}
        routes = [Route(path, apps[path], methods=[one for one in methods if path in methods[one]]) for path in apps]
        routes.append(Route(RESPONSE, endpoint(RESPONSE, responses.delete), methods=["DELETE"]))
        self._routes = routes
        self._direct: dict[str, ASGIApp] = {path: apps[path] for path in surfaces}
        self._routed = Starlette(routes=routes, exception_handlers={404: self._unknown_route, 405: self._wrong_method})
        self._entry = CrossOrigin(self._route, config.cors_origins) if config.cors_origins else self._route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path[-1:] == "/" and len(path) > 1:
            # Not a redirect: with one, many clients lose the body of a POST.
            scope["path"] = path.rstrip("/") or "/"
        if scope["type"] == "http" and scope["method"] == "POST":
            direct = self._direct.get(scope["path"])
            if direct is not None:
                await direct(scope, receive, send)
                return
        await self._routed(scope, receive, send)

    async def _unknown_route(self, request: Request, _: Exception) -> Response:
        path = request.url.path
        known_elsewhere = path.rstrip("/") in NOT_YET
        error = not_yet(path) if known_elsewhere else UnknownRoute(f"This server has no path '{path[:200]}'.")
        return self._refuse(request, error)

    async def _wrong_method(self, request: Request, _: Exception) -> Response:
        # Of all routes with this path: Starlette names those of the first.
        ours = [route for route in self._routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = {"allow": ", ".join(sorted({method for route in ours for method in route.methods or ()}))}
        message = f"'{request.url.path[:200]}' does not accept {request.method}."
        return self._refuse(request, WrongMethod(message), allowed)

    def _refuse(self, request: Request, error: ApiError, headers: dict[str, str] | None = None) -> Response:
        names = names_of(dict(request.headers.raw), path=request.url.path)
        if self._keys is not None:
            try:
                names = names._replace(key=self._keys.key_of(dict(request.headers.raw)).name)
            except Unauthorized as unauthorized:
                # Which paths there are is said to those alone who may ask.
                error, headers = unauthorized, {"www-authenticate": "Bearer"}
        self._observer.answered("unknown", error.status)
        self._observer.failed(names, error)
        said = {name.decode(): value.decode() for name, value in names.headers()}
        form = errors_of(request.url.path)
        body, status = form.body(error, names.ours), form.status(error)
        return Response(body, status, {**(headers or {}), **said}, media_type="application/json")
