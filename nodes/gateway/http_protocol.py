"""uvicorn's httptools protocol with the bounds that it lacks, and with OpenAI's form where it answers by itself.

Bounds: bytes of a head, its time to arrive, trailers, requests in line on one connection (the rest is not read, and it
is closed after them), what of their bodies waits there, how long a body may go on that was answered before its end, and
how long a client may leave unread what is written to it. A request of HTTP/1.1 names its host, once.
"""

import asyncio
import contextlib
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nodes.gateway.bodies import ArrivingBody, BodyBudget, client_of
from nodes.gateway.errors import BadRequest
from nodes.gateway.http_call import PIECES

MAX_HEAD_BYTES = 65536
HEAD_TIMEOUT_S = 30.0
READER_TIMEOUT_S = 60.0
LINGER_S = 5.0
MAX_PIPELINED = 64
_TOO_LONG = f"The request's head is longer than {MAX_HEAD_BYTES} bytes."
_OF_UPGRADES = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _NotTaken(Exception):
    """A parser's callback says why it goes no further."""


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

    def __init__(self, *args: Any, newcomers: Newcomers, budget: BodyBudget, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._newcomers = newcomers
        self._budget = budget
        self._in_line: ArrivingBody | None = None
        self._reads_head = True
        self._num_head_bytes = 0
        self._num_held_bytes = 0
        self._has_progressed = False
        self._is_deaf = False
        self._answering: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

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
        self._forget_linger_timer()
        self._forget_line()
        self._tell_answering()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then see whether the head has come, and how much there is that brought nothing yet."""
        if self._is_deaf:
            return
        self._has_progressed = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            why = error.__context__
            known = isinstance(why, _NotTaken)
            self.send_400_response(str(why) if known else "This is not HTTP/1.1 as this server reads it.")
        if self._is_deaf or self.transport.is_closing():
            return
        # The parser keeps a line, be it of a head, of trailers or of a chunk's extensions, until it has its end.
        # What came with something that has its end was mostly that.
        self._num_held_bytes = 0 if self._has_progressed else self._num_held_bytes + len(data)
        if self._num_held_bytes > MAX_HEAD_BYTES:
            self.send_400_response(_TOO_LONG)
        elif self._reads_head and self._num_held_bytes and self._head_timer is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped: nobody reads them."""
        if self._reads_head:
            # The colon, a space, and the end of the line.
            self._count_head(len(name) + len(value) + 4)
            super().on_header(name, value)
        else:
            self._has_progressed = True

    def on_headers_complete(self) -> None:
        """The body follows."""
        if self.parser.should_upgrade():
            # It comes once more, see `_parse`.
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            # uvicorn would take as many more with every answer that it gives.
            raise _NotTaken("Too many requests in line on one connection.")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            # Those between client and server may go by another one than the server does (RFC 9112, 3.2).
            raise _NotTaken("A request of HTTP/1.1 names its host in one Host header.")
        self._reads_head = False
        self._has_progressed = True
        self._forget_timer()
        super().on_headers_complete()
        self._newcomers.leave(self)
        # uvicorn reads no more while a request is in line, but a socket that is not read does not tell of its end.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._has_progressed = True
        if self.cycle is not self._answering:
            # Its request reads and counts it when it is its turn.
            self._count_in_line(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head follows."""
        if self.parser.should_upgrade():
            return
        self._reads_head = True
        self._has_progressed = True
        super().on_message_complete()
        if self._linger_timer is not None:
            # uvicorn's timer between requests ended with the first byte after the answer.
            self._forget_linger_timer()
            self._expect_head()

    def on_response_complete(self) -> None:
        """An answer was given; what goes on of its request's body is read for a while, and dropped: a connection that
        is closed while its client sends takes the answer with it.
        """
        goes_on = self.cycle is self._answering and not self._reads_head
        super().on_response_complete()
        if goes_on and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(LINGER_S, self._close)

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

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise _NotTaken(_TOO_LONG)

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
        cycle.scope["extensions"] = {PIECES: {"writer": _Pieces(cycle)}}
        if not self.pipeline:
            self._forget_line()
        super()._start_asgi_task(cycle, app)

    def _tell_answering(self) -> None:
        """Tell the request that is answered that its client has left; uvicorn tells only the last of pipelined ones."""
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _count_in_line(self, num_bytes: int) -> None:
        now = self.loop.time()
        if self._in_line is None:
            self._in_line = self._budget.open(client_of(self.client[0] if self.client else ""), now)
        if self._in_line is None or not self._in_line.take(num_bytes, now):
            raise _NotTaken("Too many bodies in line.")

    def _forget_line(self) -> None:
        if self._in_line is not None:
            self._in_line.close()
            self._in_line = None

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

    def _forget_linger_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _forget_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


class _Pieces:
    """What uvicorn's `send` does with a piece in the middle of a stream, without a coroutine for each token."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def can_write(self) -> bool:
        return not self._cycle.flow.write_paused and bool(self._cycle.chunked_encoding)

    def write(self, data: bytes) -> None:
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
