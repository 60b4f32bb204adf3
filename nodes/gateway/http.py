"""The HTTP surface: which path is answered by what.

Starlette routes; the two routes that stream are called before it, since each layer around `send` is paid for every
token. Built by `actor.py` once its service is there.
"""

import hashlib
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nodes.gateway.completions import CHAT, TEXT, CompletionEndpoint
from nodes.gateway.endpoint import Endpoint, Handler
from nodes.gateway.errors import ApiError, UnknownModel, UnknownRoute, WrongMethod
from nodes.gateway.http_call import BodyBudget, HttpCall, request_id_of
from nodes.gateway.metrics import CONTENT_TYPE
from nodes.gateway.observer import HttpObserver
from nodes.gateway.openai_types import DetokenizedText, ModelCard, ModelList, Readiness, Tokenized, Version
from nodes.gateway.openapi import document
from nodes.gateway.scrape import Scraper
from nodes.gateway.service import GatewayService
from nodes.gateway.status_page import status_page
from nodes.gateway.validation import Validator


def server_version() -> str:
    """The installed distribution's version."""
    try:
        return installed_version("kvmesh")
    except PackageNotFoundError:
        return "0+unknown"


class Pages:
    """Handlers of all routes but the two that generate."""

    def __init__(self, service: GatewayService, validator: Validator, scraper: Scraper, observer: HttpObserver) -> None:
        self._service = service
        self._config = service.config
        self._validator = validator
        self._scraper = scraper
        self._observer = observer
        self._version = server_version()
        self._openapi = document(self._version)
        self._created = int(time.time())
        self.budget = BodyBudget(service.config.max_buffered_bytes)

    async def models(self, call: HttpCall) -> None:
        """GET /v1/models."""
        await call.respond(200, msgspec.json.encode(ModelList(data=[self._card()])))

    async def model(self, call: HttpCall) -> None:
        """GET /v1/models/{model_id}."""
        name = call.path_params["model_id"]
        if name != self._config.model_name:
            raise UnknownModel(f"The model '{name[:200]}' does not exist.", param="model")
        await call.respond(200, msgspec.json.encode(self._card()))

    async def tokenize(self, call: HttpCall) -> None:
        """POST /tokenize."""
        body = await self._read(call)
        question, unknown_fields = self._validator.tokenize(body, call.request_id)
        self._observer.unknown_fields(unknown_fields)
        param = "prompt" if question.chat is None else "messages"
        prepared = await self._service.prepare(question, prompt_param=param)
        token_ids = prepared.token_ids[0]
        answer = Tokenized(count=len(token_ids), max_model_len=self._config.context_length, tokens=token_ids)
        await call.respond(200, msgspec.json.encode(answer))

    async def detokenize(self, call: HttpCall) -> None:
        """POST /detokenize."""
        body, unknown_fields = self._validator.detokenize(await self._read(call))
        self._observer.unknown_fields(unknown_fields)
        skip = bool(body.skip_special_tokens)
        text = await self._service.detokenize(body.tokens, skip_special_tokens=skip)
        await call.respond(200, msgspec.json.encode(DetokenizedText(prompt=text)))

    async def live(self, call: HttpCall) -> None:
        """GET /health/live: this loop turns."""
        await call.respond(200, msgspec.json.encode(Readiness()))

    async def ready(self, call: HttpCall) -> None:
        """GET /health/ready: a request sent now would be served."""
        reasons = self._service.missing_roles()
        if not reasons:
            await call.respond(200, msgspec.json.encode(Readiness()))
            return
        body = msgspec.json.encode(Readiness(status="not_ready", reasons=reasons))
        await call.respond(503, body, retry_after_s=self._config.retry_after_s)

    async def metrics(self, call: HttpCall) -> None:
        """GET /metrics: the whole mesh."""
        await call.respond(200, await self._scraper.page(), content_type=CONTENT_TYPE)

    async def version(self, call: HttpCall) -> None:
        """GET /version."""
        await call.respond(200, msgspec.json.encode(Version(version=self._version)))

    async def openapi(self, call: HttpCall) -> None:
        """GET /openapi.json."""
        await call.respond(200, self._openapi)

    async def status(self, call: HttpCall) -> None:
        """GET /."""
        # Where this client found us; an address that we listen on may mean nothing to it.
        base_url = "http://" + call.headers.get(b"host", b"127.0.0.1").decode("latin-1")
        page = status_page(self._config, self._service.members(), self._service.missing_roles(), base_url)
        await call.respond(200, page, content_type=b"text/html; charset=utf-8")

    async def _read(self, call: HttpCall) -> bytes:
        self._service.enter_call()
        try:
            return await call.read_body(self._config, self.budget)
        finally:
            call.forget_body(self.budget)
            self._service.leave_call()

    def _card(self) -> ModelCard:
        config = self._config
        return ModelCard(
            id=config.model_name, created=self._created, max_model_len=config.context_length, root=config.model
        )


class GatewayApp:
    """The ASGI application of one gateway."""

    def __init__(self, service: GatewayService, scraper: Scraper, observer: HttpObserver) -> None:
        config, validator = service.config, Validator(service.config)
        pages = Pages(service, validator, scraper, observer)
        identity = f"{server_version()} {config.model} {config.model_name} {config.context_length}"
        fingerprint = "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]
        self._observer = observer

        def endpoint(path: str, handler: Handler) -> Endpoint:
            return Endpoint(path, handler, observer)

        budget = pages.budget
        chat = CompletionEndpoint(
            service, CHAT, validator.chat, fingerprint=fingerprint, budget=budget, observer=observer
        )
        text = CompletionEndpoint(
            service, TEXT, validator.text, fingerprint=fingerprint, budget=budget, observer=observer
        )
        posts: dict[str, Handler] = {
            CHAT.path: chat,
            TEXT.path: text,
            "/tokenize": pages.tokenize,
            "/detokenize": pages.detokenize,
        }
        gets: dict[str, Handler] = {
            "/": pages.status,
            "/v1/models": pages.models,
            "/v1/models/{model_id:path}": pages.model,
            "/health/live": pages.live,
            "/health/ready": pages.ready,
            "/metrics": pages.metrics,
            "/version": pages.version,
            "/openapi.json": pages.openapi,
        }
        apps = {path: endpoint(path, handler) for path, handler in (posts | gets).items()}
        routes = [Route(path, apps[path], methods=["POST" if path in posts else "GET"]) for path in apps]
        handlers = {404: self._unknown_route, 405: self._wrong_method}
        self._direct: dict[str, ASGIApp] = {path: apps[path] for path in (CHAT.path, TEXT.path)}
        self._routed = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and scope["method"] == "POST":
            direct = self._direct.get(scope["path"])
            if direct is not None:
                await direct(scope, receive, send)
                return
        await self._routed(scope, receive, send)

    async def _unknown_route(self, request: Request, _: Exception) -> Response:
        return self._refuse(request, UnknownRoute(f"There is no '{request.url.path[:200]}' here."))

    async def _wrong_method(self, request: Request, error: Exception) -> Response:
        allowed = dict(getattr(error, "headers", None) or {})
        message = f"'{request.url.path[:200]}' does not take {request.method}."
        return self._refuse(request, WrongMethod(message), allowed)

    def _refuse(self, request: Request, error: ApiError, headers: dict[str, str] | None = None) -> Response:
        self._observer.answered("unknown", error.status)
        request_id = request_id_of(dict(request.headers.raw))
        return Response(
            error.body(), error.status, {**(headers or {}), "X-Request-Id": request_id}, media_type="application/json"
        )
