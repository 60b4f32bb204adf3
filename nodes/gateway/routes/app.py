"""The HTTP surface: which handler answers which path. Built by `actor.py` once its service is there."""

import re
import time
from typing import Final, NamedTuple

import msgspec

from nodes.gateway.answers.surface import Surface
from nodes.gateway.calls.completions import CompletionEndpoint
from nodes.gateway.calls.endpoint import CLIENT_LEFT, answer
from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.clients import ClientNames
from nodes.gateway.control.pages import NOT_YET, ControlPages, not_yet
from nodes.gateway.errors import (
    OPENAI_ERRORS,
    BadRequest,
    ErrorForm,
    Internal,
    TooManyRequests,
    Unavailable,
    UnknownModel,
    UnknownRoute,
    WrongMethod,
)
from nodes.gateway.fields.openai_types import DetokenizedText, ModelCard, ModelList, ServerLoad, Tokenized, Version
from nodes.gateway.fields.tool_fields import ToolUse
from nodes.gateway.http.authorization import Authorization
from nodes.gateway.http.call import Handler, HttpCall
from nodes.gateway.http.connection import Exchange
from nodes.gateway.http.cors import Origins
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.page.feed import MeshFeed
from nodes.gateway.page.shell import HEADERS, PAGE
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
MODEL: Final = "/v1/models/{model_id:path}"
RESPONSE: Final = RESPONSES.path + "/{response_id}"
COUNT_TOKENS: Final = MESSAGES.path + "/count_tokens"
HTML = b"text/html; charset=utf-8"
PLAIN = b"text/plain; charset=utf-8"

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

    def __init__(self, service: GatewayService, validator: Validator, scraper: Scraper) -> None:
        self._service = service
        self._config = service.config
        self._validator = validator
        self._scraper = scraper
        self._version = server_version()
        self._openapi = document(self._version, self._config)
        self._created = int(time.time())

    async def models(self, call: HttpCall) -> None:
        names, length = self._config.served_names, self._config.context_length
        models = [codex_model(name, priority, length) for priority, name in enumerate(names)]
        await call.respond(
            200, msgspec.json.encode(ModelList(data=[self._card(name) for name in names], models=models))
        )

    async def model(self, call: HttpCall) -> None:
        name = call.path_param
        if name not in self._config.served_names:
            raise UnknownModel(f"The model '{name[:200]}' does not exist.", param="model")
        await call.respond(200, msgspec.json.encode(self._card(name)))

    async def tokenize(self, call: HttpCall) -> None:
        body = await self._read(call)
        question, unknown_fields = self._validator.tokenize(body, call.request_id)
        call.observer.unknown_fields(unknown_fields, call.names.path)
        if question.tools is not None:
            (await self._service.tokenizers.form.get()).check_tools(ToolUse(question.tools))
        param = "prompt" if question.chat is None else "messages"
        prepared = await self._service.tokenizers.prepare(question, prompt_param=param)
        token_ids = prepared.token_ids[0]
        answer = Tokenized(count=len(token_ids), max_model_len=self._config.context_length, tokens=token_ids)
        await call.respond(200, msgspec.json.encode(answer))

    async def count_tokens(self, call: HttpCall) -> None:
        question, unknown_fields = MESSAGES.counted(self._validator, await self._read(call), call.request_id)
        call.observer.unknown_fields(unknown_fields, call.names.path)
        prepared = await self._service.tokenizers.prepare(question, prompt_param="messages")
        await call.respond(200, msgspec.json.encode(TokensCount(input_tokens=len(prepared.token_ids[0]))))

    async def detokenize(self, call: HttpCall) -> None:
        body, unknown_fields = self._validator.detokenize(await self._read(call))
        call.observer.unknown_fields(unknown_fields, call.names.path)
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
            return await call.read_body()
        finally:
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


def _generating(service: GatewayService, validator: Validator, kept: KeptResponses | None) -> dict[str, Handler]:
    fingerprint = fingerprint_of(service.config)
    handlers: dict[str, Handler] = {
        surface.path: CompletionEndpoint(service, surface, validator, fingerprint=fingerprint) for surface in SURFACES
    }
    handlers[RESPONSES.path] = ResponsesEndpoint(service, validator, kept, fingerprint=fingerprint)
    return handlers | {path: VectorEndpoint(service, form) for path, form in VECTORS.items()}


class Route(NamedTuple):
    """What answers a method of a path: `path` is as it is counted. Without an API key if it `is_open`."""

    path: str
    handler: Handler
    id_prefix: str = "req-"
    errors: ErrorForm = OPENAI_ERRORS
    is_open: bool = False


class GatewayApp:
    """All routes of one gateway."""

    def __init__(
        self,
        service: GatewayService,
        scraper: Scraper,
        observer: HttpObserver,
        keys: Authorization | None = None,
        kept: KeptResponses | None = None,
        feed: MeshFeed | None = None,
    ) -> None:
        config, validator = service.config, Validator(service.config)
        pages, health = Pages(service, validator, scraper), HealthPages(service, validator)
        self._observer = observer
        for path in (*VECTORS, *(surface.path for surface in SURFACES)):
            failures = (errors_of(path).status(error("")) for error in _WATCHED)
            observer.serves(path, (200, CLIENT_LEFT, *failures))
        self._keys = keys
        self._clients = ClientNames(config.trusted_proxies, config.client_salt)
        self._origins = Origins(config.cors_origins) if config.cors_origins else None
        responses = ResponsePages(kept)
        control = ControlPages(service, server_version())
        posts: dict[str, Handler] = {
            **_generating(service, validator, kept),
            **control.posts,
            COUNT_TOKENS: pages.count_tokens,
            RESPONSE + "/cancel": responses.cancel,
            "/tokenize": pages.tokenize,
            "/detokenize": pages.detokenize,
            **control.either,
        }
        gets: dict[str, Handler] = {
            **({} if feed is None else {"/": pages.page, "/events/mesh": feed}),
            "/v1/models": pages.models,
            MODEL: pages.model,
            RESPONSE: responses.get,
            **_probed(health),
            "/metrics": pages.metrics,
            "/version": pages.version,
            "/load": pages.load,
            "/tokenizer_info": pages.tokenizer_info,
            **control.gets,
            "/openapi.json": pages.openapi,
            "/docs": pages.docs,
            **control.either,
        }
        id_prefixes = {path: one.id_prefix for path, one in VECTORS.items()}
        id_prefixes |= {surface.path: surface.id_prefix for surface in SURFACES}
        self.routes: dict[str, dict[str, Route]] = {}
        """By path and method."""
        by_method = {"POST": posts, "GET": gets, "HEAD": gets, "DELETE": {RESPONSE: responses.delete}}
        for method, handlers in by_method.items():
            for path, handler in handlers.items():
                prefix = id_prefixes.get(path, "req-")
                route = Route(path, handler, prefix, errors_of(path), path in OPEN)
                self.routes.setdefault(path, {})[method] = route
        self._with_param = {path: _pattern(path) for path in self.routes if "{" in path}

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request; raises nothing but cancellation."""
        # Not a redirect: with one, many clients lose the body of a POST.
        exchange.path = exchange.path.rstrip("/") or "/"
        route, param = self._find(exchange)
        call = HttpCall(exchange, self._observer, route.id_prefix, route.errors, self._clients)
        call.path_param = param
        if self._origins is not None:
            exchange.added = self._origins.of_answers(call.headers)
            if self._origins.is_preflight(exchange.method, call.headers):
                await answer(call, self._preflight(self._origins, call))
                return
        try:
            await answer(call, self._serve(route, call))
        finally:
            self._observer.answered(route.path, call.status or CLIENT_LEFT)

    @staticmethod
    async def _preflight(origins: Origins, call: HttpCall) -> None:
        await call.respond(200, b"OK", content_type=PLAIN, headers=origins.of_preflight(call.headers))

    async def _serve(self, route: Route, call: HttpCall) -> None:
        if self._keys is not None and not route.is_open:
            call.belongs_to(self._keys.key_of(call.headers))
        await route.handler(call)

    def _find(self, exchange: Exchange) -> tuple[Route, str]:
        """A route, and what stands in the place of its path's open part."""
        path, param = exchange.path, ""
        methods = self.routes.get(path)
        if methods is None:
            for template, pattern in self._with_param.items():
                if (found := pattern.fullmatch(path)) is not None:
                    methods, param = self.routes[template], found[1]
        if methods is not None and (route := methods.get(exchange.method)) is not None:
            return route, param

        async def refuse(_: HttpCall) -> None:
            if methods is not None:
                error = WrongMethod(f"'{path[:200]}' does not accept {exchange.method}.")
                error.headers = ((b"allow", ", ".join(sorted(methods)).encode()),)
                raise error
            raise not_yet(path) if path in NOT_YET else UnknownRoute(f"This server has no path '{path[:200]}'.")

        # Which paths there are is said to those alone who may ask.
        return Route("unknown", refuse, errors=errors_of(path)), ""


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{\w+(:path)?\\}", lambda found: "(.*)" if found[1] else "([^/]+)", re.escape(path)))
