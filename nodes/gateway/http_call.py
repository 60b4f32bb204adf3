"""One HTTP exchange at the level of ASGI: its headers, its body within limits, its answer.

Below Starlette because an event stream sends thousands of small pieces: each layer around `send` is paid for every
token. Used by the routes that generate; made for each request.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError, BodyTimeout, BodyTooLarge, Unavailable, WrongEncoding

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_MAX_DRAIN_BYTES = 32 << 20
_DRAIN_TIMEOUT_S = 5.0


class ClientLeft(Exception):
    """The connection is gone; nobody reads an answer."""


class BodyBudget:
    """What all bodies being read may take together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Reserve; False if that is too much."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Release what `take` reserved."""
        self.num_bytes -= num_bytes


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The client's `X-Request-Id` if it is printable and short, otherwise a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"


class HttpCall:
    """Headers, body and answer of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id_of(self.headers)
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.status = 0
        self._receive = receive
        self._send = send
        self._num_reserved = 0
        self._is_read = False

    @property
    def traceparent(self) -> str:
        """The client's W3C trace context, empty if there is none or it is malformed."""
        given = self.headers.get(b"traceparent", b"")
        return given.decode() if _TRACEPARENT.fullmatch(given) else ""

    async def read_body(self, config: GatewayConfig, budget: BodyBudget) -> bytes:
        """The whole body. Raises `ApiError` over a limit, `ClientLeft` if the connection goes first."""
        encoding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"", b"identity"):
            raise WrongEncoding("Compressed bodies are not taken.")
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > config.max_body_bytes:
            raise _too_large(config)
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(config.body_timeout_s):
                more = True
                while more:
                    chunk, more = await self._next()
                    num_bytes += len(chunk)
                    if num_bytes > config.max_body_bytes:
                        raise _too_large(config)
                    if not budget.take(len(chunk)):
                        raise Unavailable("Too many large bodies at once.", retry_after_s=config.retry_after_s)
                    self._num_reserved += len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            # It has been waited for long enough.
            self._is_read = True
            raise BodyTimeout(f"The body did not arrive within {config.body_timeout_s:g} s.") from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def forget_body(self, budget: BodyBudget) -> None:
        """The body is decoded, or will never be."""
        budget.give_back(self._num_reserved)
        self._num_reserved = 0

    async def until_gone(self) -> None:
        """Return when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *, content_type: bytes = b"application/json", retry_after_s: int | None = None
    ) -> None:
        """A whole answer."""
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self.request_id.encode()),
        ]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(retry_after_s).encode()))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """An error answer; inside an event stream that has begun, its last event."""
        if self.status:
            await self.write(b"data: " + error.body() + b"\n\n", more=False)
            return
        if not self._is_read:
            await self._drain()
        await self.respond(error.status, error.body(), retry_after_s=error.retry_after_s)

    async def start_stream(self) -> None:
        """The head of an event stream."""
        self.status = 200
        headers = [*_STREAM_HEADERS, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """A piece of an event stream; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _next(self) -> tuple[bytes, bool]:
        message: Any = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        more = message.get("more_body", False)
        self._is_read = not more
        return message.get("body", b""), more

    async def _drain(self) -> None:
        """Read on for a while: an answer to a client that is still sending is lost when the connection closes."""
        if self.headers.get(b"expect", b"").lower() == b"100-continue":
            return
        num_bytes, more = 0, True
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                while more and num_bytes < _MAX_DRAIN_BYTES:
                    chunk, more = await self._next()
                    num_bytes += len(chunk)
        except TimeoutError:
            return


def _too_large(config: GatewayConfig) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {config.max_body_bytes} bytes.")
