"""uvicorn's httptools protocol with the bounds that it lacks, and with OpenAI's form where it answers by itself.

Bounds: bytes of a head, its time to arrive, trailers, requests in line on one connection (the rest is not read, and it
is closed after them), and how long a client may leave unread what is written to it.
"""

import asyncio
import contextlib
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nodes.gateway.errors import BadRequest, Unavailable

MAX_HEAD_BYTES = 65536
HEAD_TIMEOUT_S = 30.0
READER_TIMEOUT_S = 60.0
MAX_PIPELINED = 64
_OF_UPGRADES = frozenset({b"upgrade", b"connection", b"http2-settings"})


class Newcomers:
    """Connections on which nothing has been asked yet."""

    def __init__(self) -> None:
        self._connections: set[asyncio.Protocol] = set()
        self._gone = asyncio.Event()

    def enter(self, connection: asyncio.Protocol) -> None:
        """It has been made."""
        self._connections.add(connection)
        self._gone.clear()

    def leave(self, connection: asyncio.Protocol) -> None:
        """Something was asked, or it is closed; again is harmless."""
        self._connections.discard(connection)
        if not self._connections:
            self._gone.set()

    async def gone(self, timeout_s: float) -> None:
        """Return when there is none, or the time is over."""
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), timeout_s)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose heads are too long or too slow, or that is not read; bodies are `http_call.py`'s."""

    def __init__(self, *args: Any, newcomers: Newcomers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._newcomers = newcomers
        self._reads_head = True
        self._num_head_bytes = 0
        self._has_completed = False
        self._is_deaf = False
        self._answering: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn declares it
        """A client may not stay silent for ever."""
        super().connection_made(transport)
        self._newcomers.enter(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._newcomers.leave(self)
        self._forget_timer()
        self._forget_reader_timer()
        self._tell_answering()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then see whether the head has come, and how much of it is still without an end."""
        if self._is_deaf:
            return
        self._has_completed = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("This is not HTTP/1.1 as this server reads it.")
        if not self._reads_head or self._is_deaf or self.transport.is_closing():
            return
        # A request that ended in these bytes used most of them.
        self._num_head_bytes = 0 if self._has_completed else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The request's head is too long.")
        elif self._num_head_bytes and self._head_timer is None:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped: nobody reads them, and nothing bounds them."""
        if self._reads_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body follows."""
        if self.parser.should_upgrade():
            # It comes once more, see `_parse`.
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            # uvicorn would take as many more with every answer that it gives.
            raise httptools.HttpParserError("too many requests in line")
        self._reads_head = False
        self._num_head_bytes = 0
        self._forget_timer()
        super().on_headers_complete()
        self._newcomers.leave(self)
        # uvicorn reads no more while a request is in line, but a socket that is not read does not tell of its end.
        self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """The next head follows."""
        if self.parser.should_upgrade():
            return
        self._reads_head = True
        self._has_completed = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than is written to it; it may, for a while."""
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READER_TIMEOUT_S, self._reader_is_late)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._forget_reader_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """The client has sent nothing for long."""
        self._close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, after the answers that are still owed to earlier requests."""
        self._is_deaf = True
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                self.cycle.keep_alive = False
                return
            # Its own body is what cannot be read.
            self._tell_answering()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = BadRequest(msg, code="invalid_http").body()
            lines = [b"HTTP/1.1 400 Bad Request", *(b"%s: %s" % pair for pair in self.server_state.default_headers)]
            lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes all that follows for another protocol, which a server that has none may ignore.
                # Some clients (Java's) offer one with their first request, and its body is what follows.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] not in _OF_UPGRADES]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, _overloaded if app is service_unavailable else app)

    def _tell_answering(self) -> None:
        """Tell the request that is answered that its client has left; uvicorn tells only the last of pipelined ones."""
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        # Between requests the keep-alive timer rules, and a response may still be under way.
        if self._answering is None or self._answering.response_complete:
            self._close()

    def _reader_is_late(self) -> None:
        self._reader_timer = None
        self.transport.abort()

    def _close(self) -> None:
        # Closing waits until everything has been sent, which a client that reads nothing puts off for ever.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _forget_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


async def _overloaded(_scope: Any, _receive: Any, send: Any) -> None:
    """In place of the application while there are more connections than may be."""
    error = Unavailable("This gateway has as many connections as it takes.", code="too_many_connections")
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})
