"""Asks an OpenAI-compatible server over HTTP, with so little work an event that 256 streams need part of one core.

A protocol instead of streams (no task is woken for an event), httptools for HTTP, msgspec for events: an HTTP library
would take more of the machine than the mesh that is measured. Each request has a connection of its own.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from cli.bench.answer import AnswerReader, Misdeed, Sample

SILENCE_S: Final = 120.0
"""How long a server may say nothing: a queue may be long, but longer than this it counts as stalled."""
_END_S: Final = 1.0
"""How long after `[DONE]` the end of the body is waited for: closing before it would be a client's abort."""
_MAX_BODY_BYTES: Final = 1 << 20
"""Of an answer that is no stream: a list of models, or an error."""


@dataclass(frozen=True)
class Server:
    """Where to ask. `path` stands before `/v1`; `address` is dialled for `host`, once that has been looked up."""

    host: str
    port: int
    path: str = ""
    tls: bool = False
    key: str = ""
    address: str = ""

    @classmethod
    def at(cls, url: str, key: str = "") -> "Server":
        """That of `url`, with `/v1` at its end or without. Raises ValueError if it is not the URL of a server."""
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or parts.query:
            raise ValueError("it must be http:// or https:// with a host, and a port unless it is the default one")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), parts.path, tls, key)

    @property
    def url(self) -> str:
        """As people write it."""
        return f"{'https' if self.tls else 'http'}://{self._place}{self.path}"

    @property
    def _place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A whole HTTP request."""
        head = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {self._place}",
            "Connection: close",
            *([f"Content-Type: application/json\r\nContent-Length: {len(body)}"] if body else []),
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
        ]
        return "\r\n".join([*head, "", ""]).encode() + body


Opened = Callable[[asyncio.Transport], None]
"""Gets the connection of an exchange, before anything is sent over it."""


async def stream(server: Server, path: str, body: bytes, sample: Sample, *, silence_s: float = SILENCE_S) -> Sample:
    """POST `body`, and read the stream that answers it into `sample`, which the caller may look at meanwhile.

    Never raises for what a server does: `sample.failure` is one of

        connect      no connection: refused, no such host, no descriptor left
        reset        the connection broke off
        timeout      nothing came for `silence_s`
        ended_early  the body ended before `[DONE]`
        status N     the answer was not a 200
        error_event  the stream said that there is an error
        garbled      what came is no HTTP, or no event
        no_usage     the stream ended without counting its tokens
        endless      more events than any context has tokens
    """
    reader = AnswerReader(sample)
    done = await exchange(server, server.request("POST", path, body), reader, silence_s)
    if done.failed is not None:
        sample.failure, sample.detail = done.failed.kind, done.failed.detail
        sample.end_s = time.perf_counter()
    return sample


async def get(server: Server, path: str, timeout_s: float) -> tuple[bytes, Server]:
    """The body at `path`, and the server with the address that answered. Raises Misdeed as `stream` says."""
    page = _Page()
    done = await exchange(server, server.request("GET", path), page, timeout_s)
    if done.failed is not None:
        raise done.failed
    return page.body, replace(server, address=done.address)


class Reader(Protocol):
    """What takes the body of a 200; where it `is_done`, nothing is missing, however the connection ends."""

    is_done: bool

    def feed(self, data: bytes, now_s: float) -> None:
        """Take a piece. Raises Misdeed."""
        ...

    def ended(self) -> None:
        """It is over. Raises Misdeed."""
        ...


class _Page:
    """A body that is no stream."""

    is_done = False

    def __init__(self) -> None:
        self.body = b""

    def feed(self, data: bytes, now_s: float) -> None:
        self.body += data
        if len(self.body) > _MAX_BODY_BYTES:
            raise Misdeed("garbled", f"more than {_MAX_BODY_BYTES} bytes")

    def ended(self) -> None:
        """All that came is all there is."""


async def exchange(
    server: Server, request: bytes, reader: Reader, silence_s: float, opened: Opened | None = None
) -> "Exchange":
    """Send a whole `request` over a connection of its own, and have `reader` take what comes, until all has come.

    Never raises for what a server does: `failed` of what it returns is a Misdeed as `stream` says, or one that the
    reader raised, and then the connection is broken off. `opened` gets the connection once there is one.
    """
    loop = asyncio.get_running_loop()
    one = Exchange(loop, request, reader, silence_s, opened)
    context = ssl.create_default_context() if server.tls else None
    named = server.host if server.tls else None
    try:
        async with asyncio.timeout(silence_s):
            await loop.create_connection(
                lambda: one, server.address or server.host, server.port, ssl=context, server_hostname=named
            )
    except TimeoutError:
        one.fail("timeout", f"no connection in {silence_s:g} s")
    except (OSError, UnicodeError) as error:
        one.fail("connect", getattr(error, "strerror", None) or str(error))
    try:
        await one.over
    finally:
        one.close()
    return one


class Exchange(asyncio.Protocol):
    """One request and its answer. `over` is done once that is whole, or `failed` says why it is not."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        request: bytes,
        reader: Reader,
        silence_s: float,
        opened: Opened | None = None,
    ) -> None:
        self.failed: Misdeed | None = None
        self.address = ""
        self.over: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._request = request
        self._reader = reader
        self._silence_s = silence_s
        self._opened = opened
        self._heard_s = loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._error_body = b""
        self._parser = httptools.HttpResponseParser(self)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop are no subclass.
        self._transport = cast("asyncio.Transport", transport)
        self.address = transport.get_extra_info("peername")[0]
        if self._opened is not None:
            self._opened(self._transport)
        self._transport.write(self._request)
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_at(self._heard_s + self._silence_s, self._look)

    def data_received(self, data: bytes) -> None:
        if self.over.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail("garbled", f"no HTTP: {error}: {data[:80].decode(errors='replace')}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.over.done():
            return
        # After `[DONE]` nothing is missing, however the connection ends.
        if exc is not None and not self._reader.is_done:
            self.fail("reset", str(exc))
        else:
            self.on_message_complete()

    # What the parser calls.

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self.over.done():
            return
        if self._parser.get_status_code() != 200:
            self._error_body = (self._error_body + body)[:_MAX_BODY_BYTES]
            return
        self._heard_s = self._loop.time()
        try:
            self._reader.feed(body, time.perf_counter())
        except Misdeed as misdeed:
            self._fail(misdeed)
        else:
            if self._reader.is_done and self._timer is not None:
                self._timer.cancel()
                self._timer = self._loop.call_later(_END_S, self.on_message_complete)

    def on_message_complete(self) -> None:
        """The answer is over, as the server says, or because the connection is."""
        if self.over.done():
            return
        try:
            status = self._parser.get_status_code()
            if status == 0:
                raise Misdeed("ended_early", "the connection was closed without an answer")
            if status != 200:
                raise Misdeed(f"status {status}", self._error_body.decode(errors="replace"))
            self._reader.ended()
        except Misdeed as misdeed:
            self._fail(misdeed)
        else:
            self.over.set_result(None)

    def fail(self, kind: str, detail: str) -> None:
        self._fail(Misdeed(kind, detail))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is None:
            return
        if self.failed is None and self.over.done():
            self._transport.close()
        else:
            # `close` would wait until a server that stalls has taken what was written.
            self._transport.abort()

    def _fail(self, misdeed: Misdeed) -> None:
        if not self.over.done():
            self.failed = misdeed
            self.over.set_result(None)

    def _look(self) -> None:
        # One timer an answer that looks when it last said something: moving it for each event would cost as much as
        # reading the event.
        due_s = self._heard_s + self._silence_s
        if self._loop.time() >= due_s:
            self.fail("timeout", f"nothing came for {self._silence_s:g} s")
        else:
            self._timer = self._loop.call_at(due_s, self._look)


def encoded(body: dict[str, Any]) -> bytes:
    """A body for `stream`, with what makes the answer a stream that counts its tokens."""
    return msgspec.json.encode(body | {"stream": True, "stream_options": {"include_usage": True}})


MakeBody = Callable[[int], dict[str, Any]]
"""The body of the request of a number."""
