"""A call that came over HTTP: its headers, its body within limits, its answer with the names of the request.

Made by `routes/app.py` for each exchange.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from typing_extensions import override

from nodes.gateway.calls.call import Call, ClientLeft
from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.clients import Client, ClientNames
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import (
    ApiError,
    BodyTooLarge,
    ErrorForm,
    TooManyRequests,
    TooSlow,
    Unavailable,
    WrongMediaType,
)
from nodes.gateway.http.bodies import ArrivingBody
from nodes.gateway.http.connection import Exchange, Header
from nodes.gateway.request_names import names_of

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class HttpCall(Call):
    """Headers, body and answer of one request, whose id begins with `id_prefix`; `errors` is how those are told."""

    def __init__(
        self, exchange: Exchange, observer: HttpObserver, id_prefix: str, errors: ErrorForm, clients: ClientNames
    ) -> None:
        self.headers: dict[bytes, bytes] = dict(exchange.headers)
        super().__init__(names_of(self.headers, id_prefix, exchange.path), observer, exchange.gone)
        self.query = exchange.query
        self.path_param = ""
        """What stands in the path in the place of the part that its route leaves open."""
        self._exchange = exchange
        self._errors = errors
        self._error_event: Callable[[ApiError], bytes] | None = None
        self._clients = clients
        self._address = clients.address(exchange.peer, exchange.headers)

    @property
    @override
    def client(self) -> Client:
        """By its key, if it has brought one by now."""
        return self._clients.of(self.key, self._address)

    @override
    async def read_body(self) -> bytes:
        budget = self._exchange.budget
        config = budget.config
        _check_media_type(self.headers)
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > config.max_body_bytes:
            raise _too_large(config)
        now = asyncio.get_running_loop().time
        arriving = budget.open(self._address, now())
        if arriving is None:
            message = (
                "Too many request bodies from this client are arriving at once. Send fewer, or each without pauses."
            )
            raise TooManyRequests(message, retry_after_s=config.retry_after_s)
        try:
            if self._exchange.is_whole:
                # With its head, as most bodies come: a timer that cannot fire takes 2 % of a gateway's time.
                return (await self._read(0, arriving, config))[0]
            # Usually a single piece. Keeping many small ones as they are would take more memory than their contents.
            body, is_last = b"", False
            pieces = bytearray()
            async with asyncio.timeout_at(arriving.deadline) as timer:
                while not is_last:
                    pieces += body
                    body, is_last = await self._read(len(pieces), arriving, config)
                    timer.reschedule(arriving.deadline)
            return bytes(pieces) + body if pieces else body
        except TimeoutError:
            self._exchange.is_late = True
            raise _too_slow(config) from None
        finally:
            # Whoever asked decodes it in this turn of the loop.
            arriving.close()

    async def _read(self, num_before: int, arriving: ArrivingBody, config: GatewayConfig) -> tuple[bytes, bool]:
        """A piece of the body, counted, and whether it is the last. Raises `ApiError` over a limit."""
        body, is_last = await self._exchange.read()
        if self.gone.done():
            raise ClientLeft
        if num_before + len(body) > config.max_body_bytes:
            raise _too_large(config)
        if not arriving.take(len(body), asyncio.get_running_loop().time()):
            message = "Too much request body data is arriving at once."
            raise Unavailable(message, retry_after_s=config.retry_after_s)
        return body, is_last

    @override
    async def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        headers: Iterable[Header] = (),
    ) -> None:
        """A whole answer. It goes out at once, even if part of the request's body is missing."""
        self.status = status
        headers = ((b"content-type", content_type), *headers, *self.names.headers())
        self._exchange.begin(status, headers, len(body))
        await self.write(body, more=False)

    @override
    def status_of(self, error: ApiError) -> int:
        return self._errors.status(error)

    @override
    async def fail(self, error: ApiError) -> None:
        if self.status:
            event = self._error_event
            await self.write(self._errors.event(error, self.request_id) if event is None else event(error), more=False)
            return
        await self.respond(self.status_of(error), self._errors.body(error, self.request_id), headers=error.headers)

    @override
    async def start_stream(self, error_event: Callable[[ApiError], bytes] | None = None) -> None:
        self.status = 200
        self._error_event = error_event
        self._exchange.begin(200, (*_STREAM_HEADERS, *self.names.headers()), None)

    @property
    @override
    def is_paused(self) -> bool:
        return self._exchange.is_paused

    @override
    def write_now(self, data: bytes) -> None:
        self._exchange.write(data)

    @override
    async def write(self, data: bytes, *, more: bool = True) -> None:
        if self._exchange.is_paused:
            await self._exchange.keeps_up()
        self._exchange.write(data, more=more)

    def cut(self) -> None:
        """End the connection of a client that does not read; `gone` is done then."""
        self._exchange.cut()


Handler = Callable[[HttpCall], Awaitable[None]]
"""Answers the calls of a route; raises `ApiError`, `ClientLeft`."""


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
