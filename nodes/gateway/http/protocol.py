"""uvicorn's httptools protocol with the bounds that it lacks, and OpenAI's error form where it answers by itself.

Bounded are the bytes of a head and its trailers, and those of a message that are neither these nor body; the time for a
head to arrive; the requests in line on one connection (more are not read, and it is closed after them) and the bytes of
their bodies that wait; how long a body may continue once its request was answered; how long a client may leave unread
what is written to it.

Messages that another server on the path may understand differently are refused, so that no request can hide in
another's body (RFC 9112, 3.2, 6.1 and 11.2): a host that is missing, repeated or invalid, a body whose length is given
by anything but `Content-Length` or `Transfer-Encoding: chunked`, a version other than 1.0 and 1.1. Nor is anything sent
that the version of the request does not know: to HTTP/1.0 no chunks.
"""

import asyncio
import contextlib
import http
import re
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nodes.gateway.clients import client_of
from nodes.gateway.errors import ApiError, BadRequest, TooSlow
from nodes.gateway.http.acceptor import Peer
from nodes.gateway.http.bodies import ArrivingBody, BodyBudget
from nodes.gateway.http.call import PIECES
from nodes.gateway.request_names import names_of

MAX_HEAD_BYTES = 65536
"""Browsers' cookies and proxies' tokens take up to 16 KB. With 16,384 connections 1 GB at worst."""
HEAD_TIMEOUT_S = 30.0
"""A head fits a few packets, each sent again after 1, 2, 4, 8 s when lost. Silent connections are closed as soon."""
READER_TIMEOUT_S = 60.0
"""A laptop that sleeps or a phone in a tunnel may come back; its request computes on, for at most a minute in vain."""
LINGER_S = 5.0
"""As `DRAIN_TIMEOUT_S`, for a body whose answer was given by the application before the body had come."""
MAX_PIPELINED = 64
"""More than clients send without waiting for an answer; each that waits holds a head of up to 64 KiB."""
CHUNK_LINES_BYTES = 16
"""Allowed between two pieces of a chunked body: the size of the next one, and at most three line ends."""
_TOO_LONG = f"The request's head is longer than {MAX_HEAD_BYTES} bytes."
_TOO_MUCH_ELSE = f"The request has more than {MAX_HEAD_BYTES} bytes that are neither head nor body."
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
_VERSIONS = ("1.0", "1.1")
_OF_UPGRADES = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _NotTaken(Exception):
    """Raised in a parser's callback to refuse the request; says why."""


class Newcomers:
    """Connections that have sent no request yet."""

    def __init__(self) -> None:
        self._connections: set[asyncio.Protocol] = set()
        self._gone = asyncio.Event()

    def enter(self, connection: asyncio.Protocol) -> None:
        self._connections.add(connection)
        self._gone.clear()

    def leave(self, connection: asyncio.Protocol) -> None:
        """The connection sent a request, or was closed; calling this again is harmless."""
        if connection in self._connections:
            self._connections.remove(connection)
            if not self._connections:
                self._gone.set()

    async def gone(self, timeout_s: float) -> None:
        """Return when no such connection is left, or the time is over."""
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), timeout_s)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections with too long or too slow heads, or clients that do not read; `call.py` limits bodies."""

    def __init__(self, *args: Any, newcomers: Newcomers, budget: BodyBudget, peer: Peer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client, self.scheme = peer, "http"
        self._newcomers = newcomers
        self._budget = budget
        self._in_line: ArrivingBody | None = None
        self._reads_head = True
        self._num_head_bytes = 0
        self._num_else_bytes = 0
        self._has_begun = False
        self._has_ended = False
        self._is_deaf = False
        self._answering: RequestResponseCycle | None = None
        self._gone: asyncio.Future[None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn declares it
        # Not uvicorn's own, which asks the socket for both of its addresses, and makes an object for each question:
        # 30 calls, 4 % of a request that comes with a connection of its own.
        self.connections.add(self)
        self.transport, self.flow = transport, FlowControl(transport)
        self._newcomers.enter(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._newcomers.leave(self)
        self._forget_timer()
        self._forget_reader_timer()
        self._forget_linger_timer()
        self._forget_line()
        self._tell_answering()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Data may still come while the answers that are owed are written.
        if self._is_deaf:
            return
        self._has_ended = False
        # The callbacks subtract what they are given. What is left are incomplete lines, which the parser keeps, and
        # what it drops: extensions of chunks, spaces.
        self._num_else_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except _NotTaken as refusal:
            self.send_400_response(str(refusal))
        except httptools.HttpParserError as error:
            # What a callback raises comes out of the parser as the context of an error of its own.
            why = error.__context__
            self.send_400_response(str(why) if isinstance(why, _NotTaken) else "This is not a valid HTTP request.")
        if self._is_deaf or self.transport.is_closing():
            return
        in_head = self._reads_head and self._has_begun
        if self._num_else_bytes + (self._num_head_bytes if in_head else 0) > MAX_HEAD_BYTES:
            self.send_400_response(_TOO_LONG if in_head else _TOO_MUCH_ELSE)
            return
        if (in_head or (self._reads_head and not self._has_ended)) and self._head_timer is None:
            self._expect_head()
        # Bytes after the end of a message are less than one read; counting starts anew with the next read.
        self._num_else_bytes = 0 if self._has_ended else max(0, self._num_else_bytes)

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        self._has_begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer. Trailers count as part of the head and are dropped, since nobody reads them."""
        # The colon, a space, and the end of the line.
        self._count_head(len(name) + len(value) + 4)
        if self._reads_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            # The head is parsed once more, see `_parse`.
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            # uvicorn would take as many again after every answer that it gives.
            raise _NotTaken(f"More than {MAX_PIPELINED} requests are queued on this connection.")
        self._check_head()
        self._reads_head = False
        self._forget_timer()
        super().on_headers_complete()
        self._newcomers.leave(self)
        # uvicorn stops reading while a request is in line, but a socket that is not read does not report its end.
        self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._num_else_bytes -= CHUNK_LINES_BYTES

    def on_body(self, body: bytes) -> None:
        self._num_else_bytes -= len(body)
        if self.cycle is not self._answering:
            # Counted here until its request's turn comes: then the request reads and counts it.
            self._count_in_line(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reads_head = self._has_ended = True
        self._has_begun = False
        super().on_message_complete()
        if self._linger_timer is not None:
            # uvicorn cancelled its keep-alive timer at the first byte after the answer.
            self._forget_linger_timer()
            self._expect_head()

    def on_response_complete(self) -> None:
        """An answer was given. If its request's body still goes on, that is read for a while and dropped: closing a
        connection while its client sends would lose the answer.
        """
        goes_on = self.cycle is self._answering and not self._reads_head
        super().on_response_complete()
        if goes_on and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(LINGER_S, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READER_TIMEOUT_S, self._reader_is_late)

    def resume_writing(self) -> None:
        self._forget_reader_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, after the answers that are still owed to earlier requests; nothing more is read."""
        self._is_deaf = True
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body and not (cycle is self.cycle and self._num_else_bytes > MAX_HEAD_BYTES):
                self.cycle.keep_alive = False
                return
            # What cannot be read is the body of the request being answered.
            self._tell_answering()
        # Nothing else can be written into the middle of an answer; it ends where it is.
        if cycle is None or cycle.response_complete or not cycle.response_started:
            # The part of the head that has come may contain its names.
            names = names_of(dict(self.headers or ()))
            body = error.body(names.ours)
            lines = [b"HTTP/1.1 %d %s" % (error.status, http.HTTPStatus(error.status).phrase.encode())]
            lines += [b"%s: %s" % pair for pair in (*self.server_state.default_headers, *names.headers())]
            lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes all that follows an offered upgrade for another protocol, but a server may ignore the
                # offer. Some clients (Java's) make one with their first request, and what follows is its body.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _check_head(self) -> None:
        """Raises `_NotTaken` for what the parser lets pass and this server refuses."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if version not in _VERSIONS:
            raise _NotTaken("Unsupported HTTP version: this server speaks HTTP/1.1 and HTTP/1.0.")
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise _NotTaken("A request must have exactly one Host header; with HTTP/1.0 it may have none.")
        if not all(map(_HOST.fullmatch, hosts)):
            raise _NotTaken("The Host header must be a host name or an address, optionally with a port.")
        if encodings and (version == "1.0" or [encoding.lower() for encoding in encodings] != [b"chunked"]):
            raise _NotTaken(
                "Unsupported Transfer-Encoding: send 'chunked' alone, in HTTP/1.1 only, or a Content-Length."
            )

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        self._num_else_bytes -= num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise _NotTaken(_TOO_LONG)

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise _NotTaken("CONNECT is not supported: this server is not a proxy.")
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] not in _OF_UPGRADES]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._gone = self.loop.create_future()
        cycle.scope["extensions"] = {PIECES: {"writer": _Pieces(cycle, self._gone)}}
        if not self.pipeline:
            self._forget_line()
        if cycle.scope["http_version"] == "1.0":
            app = _ends_by_closing(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _tell_answering(self) -> None:
        """Tell the request being answered that its client has left; of pipelined ones, uvicorn tells only the last."""
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if self._gone is not None and not self._gone.done():
                self._gone.set_result(None)

    def _count_in_line(self, num_bytes: int) -> None:
        now = self.loop.time()
        if self._in_line is None:
            self._in_line = self._budget.open(client_of(self.client[0] if self.client else ""), now)
        if self._in_line is None or not self._in_line.take(num_bytes, now):
            raise _NotTaken("Too many request bodies are queued on this connection.")

    def _forget_line(self) -> None:
        if self._in_line is not None:
            self._in_line.close()
            self._in_line = None

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        # A response is still under way; after it, the keep-alive timer applies.
        if self._answering is not None and not self._answering.response_complete:
            return
        if self._has_begun and not self.transport.get_write_buffer_size():
            self._refuse(TooSlow(f"The request's head did not arrive within {HEAD_TIMEOUT_S:g} s."))
        else:
            # There is no request, and an unsolicited answer may be taken for the answer to one that is just being sent.
            self._close()

    def _reader_is_late(self) -> None:
        self._reader_timer = None
        # Not `close`, which waits until the buffer is sent, and this client does not read.
        self.transport.abort()

    def _close(self) -> None:
        # `close` waits until everything has been sent, which never happens if the client reads nothing.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _forget_linger_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _forget_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


def _ends_by_closing(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """An application whose answers of unknown length are not chunked, which HTTP/1.0 does not know (RFC 9112, 6.1):
    its clients and proxies would take the sizes for text. Their end is that of the connection, which has no other use.
    """

    async def unchunked(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def send_plainly(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if is_open:
                    cycle.chunked_encoding = False
            elif is_open:
                # uvicorn compares what is sent with what was announced: of each piece its own.
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_plainly)

    return unchunked


class _Pieces:
    """Does what uvicorn's `send` does with a piece in the middle of a stream, without a coroutine for each token."""

    __slots__ = ("_cycle", "gone")

    def __init__(self, cycle: RequestResponseCycle, gone: asyncio.Future[None]) -> None:
        self._cycle = cycle
        self.gone = gone

    @property
    def can_write(self) -> bool:
        return not self._cycle.flow.write_paused and bool(self._cycle.chunked_encoding)

    @property
    def is_paused(self) -> bool:
        return self._cycle.flow.write_paused

    @property
    def has_body(self) -> bool:
        return not self._cycle.more_body and not self._cycle.disconnected

    def write(self, data: bytes) -> None:
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def cut(self) -> None:
        # Not `close`, which waits until the buffer is sent.
        self._cycle.transport.abort()
