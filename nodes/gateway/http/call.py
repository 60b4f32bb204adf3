"""One HTTP exchange at the level of ASGI: its headers, its body within limits, its answer.

Below Starlette because an event stream sends thousands of small pieces: each layer around `send` costs time for every
token. Made by `endpoint.py` for each request.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from nodes.api_keys.entries import ApiKey
from nodes.gateway.admission.in_flight import Place
from nodes.gateway.clients import NOBODY, Client, ClientNames
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import (
    OPENAI_ERRORS,
    ApiError,
    BodyTooLarge,
    ErrorForm,
    TooManyRequests,
    TooSlow,
    Unavailable,
    WrongMediaType,
)
from nodes.gateway.http.bodies import ArrivingBody, BodyBudget
from nodes.gateway.request_names import names_of

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_MAX_DRAIN_BYTES = 32 << 20
"""Four times `max_body_bytes` (8 MiB): a client that sends more than that after a refusal does not mean to read it."""
PIECES = "kvmesh.pieces"
"""The scope extension whose `writer` is a `PieceWriter`."""
DRAIN_TIMEOUT_S = 5.0
"""A client on 13 Mbit/s has sent its 8 MiB by then; meanwhile the connection counts against `max_connections`."""


class PieceWriter(Protocol):
    """Writes to a connection whose stream has begun; `gone` is done once the client has left before its end."""

    gone: asyncio.Future[None]

    @property
    def can_write(self) -> bool:
        """False while `is_paused`, or if the stream is not chunked."""
        ...

    @property
    def is_paused(self) -> bool:
        """The client reads too slowly: what is written now waits until it has read more."""
        ...

    @property
    def has_body(self) -> bool:
        """The request's whole body has come: reading it waits for nothing."""
        ...

    def write(self, data: bytes) -> None:
        """A piece of the stream; dropped if the client has left."""
        ...

    def cut(self) -> None:
        """End the connection now, whatever is still to be sent."""
        ...


class ClientLeft(Exception):
    """The connection is gone; nobody reads an answer."""


class HttpCall:
    """Headers, body and answer of one request, whose id begins with `id_prefix`; `errors` is how those are told.

    `clients` names its client; without, it is nobody's (an engine's).
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        id_prefix: str = "req-",
        errors: ErrorForm = OPENAI_ERRORS,
        clients: ClientNames | None = None,
    ) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.names = names_of(self.headers, id_prefix, scope["path"])
        self.request_id = self.names.ours
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.status = 0
        self.key: ApiKey | None = None
        self.place: Place | None = None
        self._errors = errors
        self._error_event: Callable[[ApiError], bytes] | None = None
        self._receive = receive
        self._send = send
        extensions: dict[str, dict[str, PieceWriter]] = scope.get("extensions") or {}
        # Taken out: it refers back to this scope, and a reference cycle per call is work for the garbage collector.
        self._pieces = extensions.pop(PIECES, {}).get("writer")
        self._clients = clients
        peer = (scope.get("client") or ("",))[0]
        self._address = peer if clients is None else clients.address(peer, scope["headers"])
        self._arriving: ArrivingBody | None = None
        self._is_read = False
        self._is_late = False
        self._is_last = scope["http_version"] == "1.0" or b"close" in self.headers.get(b"connection", b"").lower()

    def belongs_to(self, key: ApiKey) -> None:
        """The request brought this API key, which its log lines name."""
        self.key = key
        self.names = self.names._replace(key=key.name)

    def entered(self, place: Place) -> Place:
        """Its place among the gateway's calls."""
        self.place = place
        return place

    @property
    def client(self) -> Client:
        """Whose part of the mesh it takes: by its key, if it has brought one by now."""
        return NOBODY if self._clients is None else self._clients.of(self.key, self._address)

    async def read_body(self, budget: BodyBudget) -> bytes:
        """The whole body. Raises `ApiError` over a limit, `ClientLeft` if the connection closes first."""
        config = budget.config
        _check_media_type(self.headers)
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > config.max_body_bytes:
            raise _too_large(config)
        now = asyncio.get_running_loop().time
        arriving = self._arriving = budget.open(self._address, now())
        if arriving is None:
            message = (
                "Too many request bodies from this client are arriving at once. Send fewer, or each without pauses."
            )
            raise TooManyRequests(message, retry_after_s=config.retry_after_s)
        if self._pieces is not None and self._pieces.has_body:
            # With its head, as most bodies come: a timer that cannot fire takes 2 % of a gateway's time.
            body, _ = await self._next()
            return self._taken(body, 0, arriving, now(), config)
        # Usually a single piece. Keeping many small ones as they are would take more memory than their contents.
        body, pieces = b"", bytearray()
        try:
            async with asyncio.timeout_at(arriving.deadline) as timer:
                more = True
                while more:
                    if body:
                        pieces += body
                    body, more = await self._next()
                    self._taken(body, len(pieces), arriving, now(), config)
                    timer.reschedule(arriving.deadline)
        except TimeoutError:
            # The rest is not waited for any longer.
            self._is_late = True
            raise _too_slow(config) from None
        return bytes(pieces) + body if pieces else body

    def _taken(self, body: bytes, num_before: int, arriving: ArrivingBody, now: float, config: GatewayConfig) -> bytes:
        """A piece of the body, counted. Raises `ApiError` over a limit."""
        if num_before + len(body) > config.max_body_bytes:
            raise _too_large(config)
        if not arriving.take(len(body), now):
            message = "Too much request body data is arriving at once."
            raise Unavailable(message, retry_after_s=config.retry_after_s)
        return body

    def forget_body(self) -> None:
        if self._arriving is not None:
            self._arriving.close()

    def watch(self) -> asyncio.Future[None]:
        """Done when the client has left; to be called after the body was read. The caller cancels it."""
        return asyncio.ensure_future(self._until_gone()) if self._pieces is None else self._pieces.gone

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        headers: Iterable[tuple[bytes, bytes]] = (),
        retry_after_s: int | None = None,
        closes: bool = False,
    ) -> None:
        """A whole answer, the last one of its connection if it `closes`.

        It goes out at once, even if part of the request's body is missing. If the connection stays open, the protocol
        reads that part (`BoundedHttpProtocol.on_response_complete`); else closing is delayed a while to read it.
        """
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            *headers,
            *self.names.headers(),
        ]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(retry_after_s).encode()))
        if status == 401:
            # HTTP wants it said which kind of key would do (RFC 9110, 15.5.2).
            headers.append((b"www-authenticate", b"Bearer"))
        if closes:
            headers.append((b"connection", b"close"))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if self._is_last and not (closes or self._is_read or self._asked_first):
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self._drain()
            body = b""
        await self._send({"type": "http.response.body", "body": body})

    def status_of(self, error: ApiError) -> int:
        """The status of an answer that is this error."""
        return self._errors.status(error)

    async def fail(self, error: ApiError) -> None:
        """An error answer; inside an event stream that has begun, its last event."""
        if self.status:
            event = self._error_event
            await self.write(self._errors.event(error, self.request_id) if event is None else event(error), more=False)
            return
        # No request can follow an incomplete body. A client that sent `Expect: 100-continue` has not begun to send it.
        closes = self._is_late or (not self._is_read and self._asked_first)
        status, body = self.status_of(error), self._errors.body(error, self.request_id)
        await self.respond(status, body, retry_after_s=error.retry_after_s, closes=closes)

    async def start_stream(self, error_event: Callable[[ApiError], bytes] | None = None) -> None:
        """From now on an error is the last event, by `error_event` if its form depends on what was written before."""
        self.status = 200
        self._error_event = error_event
        headers = [*_STREAM_HEADERS, *self.names.headers()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """A piece of an event stream; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @property
    def pieces(self) -> PieceWriter | None:
        """Writes to the connection at once; None if it was not made by this server's protocol."""
        return self._pieces

    @property
    def is_paused(self) -> bool:
        return self._pieces is not None and self._pieces.is_paused

    def cut(self) -> None:
        """End the connection of a client that does not read; `watch` is done then."""
        if self._pieces is not None:
            self._pieces.cut()

    @property
    def _asked_first(self) -> bool:
        return self.headers.get(b"expect", b"").lower() == b"100-continue"

    async def _next(self) -> tuple[bytes, bool]:
        message: Any = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        more = message.get("more_body", False)
        self._is_read = not more
        return message.get("body", b""), more

    async def _drain(self) -> None:
        """Read on for a while: an answer to a client that is still sending is lost when the connection closes."""
        num_bytes, more = 0, True
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while more and num_bytes < _MAX_DRAIN_BYTES:
                    chunk, more = await self._next()
                    num_bytes += len(chunk)
        except TimeoutError:
            return


def _check_media_type(headers: Mapping[bytes, bytes]) -> None:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        raise WrongMediaType("Compressed request bodies are not supported.")
    kind = headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
    # Many scripts send none, which is accepted. curl's -d says that it is a form, which would have no meaning here.
    if kind not in (b"", b"application/json") and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        given = kind[:100].decode("latin-1")
        raise WrongMediaType(
            f"The body's content type is '{given}', but this server reads JSON only. "
            "Send the header 'Content-Type: application/json' (curl: -H 'Content-Type: application/json')."
        )


def _too_slow(config: GatewayConfig) -> TooSlow:
    least = round(config.min_body_bytes_per_s * config.body_pause_s)
    return TooSlow(
        f"The body did not arrive in time: it must be complete within {config.body_timeout_s:g} s, and "
        f"{least} bytes of it must arrive every {config.body_pause_s:g} s. Send it without pauses."
    )


def _too_large(config: GatewayConfig) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {config.max_body_bytes} bytes.")
