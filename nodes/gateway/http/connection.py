"""HTTP/1 on one connection, parsed by httptools: requests in, answers out in their order, with a bound on everything.

    on_url, on_header -> head --checked--> Exchange --its turn--> a task answers it --its last piece--> the next in line
    on_body ------------------------------> its body

Bounded are the bytes of a head and its trailers, and those of a message that are neither these nor body; the time for a
head to arrive; the requests in line (more are not read, and the connection is closed after them) and the bytes of their
bodies that wait; how long a body may continue once its request was answered; how long a client may leave unread what is
written to it. `call.py` bounds the body that is read.

Messages that another server on the path may understand differently are refused, so that no request can hide in
another's body (RFC 9112, 3.2, 6.1 and 11.2): a host that is missing, repeated or invalid, a body whose length is given
by anything but `Content-Length` or `Transfer-Encoding: chunked`, a version other than 1.0 and 1.1. Nor is anything sent
that the version of the request does not know: to HTTP/1.0 no chunks. What the parser itself refuses (a length given
twice or both ways, lines that end without CR, folded ones) the tests name.
"""

import asyncio
import http
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from email.utils import formatdate
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import httptools

from nodes.gateway.clients import client_of
from nodes.gateway.errors import ApiError, BadRequest, TooSlow
from nodes.gateway.http.acceptor import Peer
from nodes.gateway.http.bodies import ArrivingBody, BodyBudget
from nodes.gateway.request_names import names_of

MAX_HEAD_BYTES = 65536
"""Browsers' cookies and proxies' tokens take up to 16 KB. With 16,384 connections 1 GB at worst."""
HEAD_TIMEOUT_S = 30.0
"""A head fits a few packets, each sent again after 1, 2, 4, 8 s when lost. Silent connections are closed as soon."""
KEEP_ALIVE_S = 75.0
"""More than proxies keep idle connections (60 s is common): whoever closes first may lose a request just being sent."""
READER_TIMEOUT_S = 60.0
"""A laptop that sleeps or a phone in a tunnel may come back; its request computes on, for at most a minute in vain."""
LINGER_S = 5.0
"""For the rest of a body that was answered before it had come. A client on 13 Mbit/s has sent its 8 MiB by then;
meanwhile the connection counts against `max_connections`.
"""
MAX_PIPELINED = 64
"""More than clients send without waiting for an answer; each that waits holds a head of up to 64 KiB."""
CHUNK_LINES_BYTES = 16
"""Allowed between two pieces of a chunked body: the size of the next one, and at most three line ends."""
_MAX_UNREAD_BYTES: Final = 65536
"""Of a body that has come before somebody reads it: then the socket is not read."""
_TOO_LONG = f"The request's head is longer than {MAX_HEAD_BYTES} bytes."
_TOO_MUCH_ELSE = f"The request has more than {MAX_HEAD_BYTES} bytes that are neither head nor body."
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
_VERSIONS = ("1.0", "1.1")
_OF_UPGRADES = frozenset({b"upgrade", b"connection", b"http2-settings"})
_PHRASES: Final = {one.value: one.phrase.encode() for one in http.HTTPStatus}
# Of all that may be sent: Anthropic's 529, for one, has no phrase.
_STATUS_LINES: Final = {one: b"HTTP/1.1 %d %s\r\n" % (one, _PHRASES.get(one, b"")) for one in range(100, 600)}

Header = tuple[bytes, bytes]


class _NotTaken(Exception):
    """Raised in a parser's callback to refuse the request; says why."""


class Served:
    """What the connections of one server share: how requests are answered, and what is open."""

    def __init__(self, answer: "Callable[[Exchange], Coroutine[Any, Any, None]]", budget: BodyBudget) -> None:
        self.answer = answer
        self.budget = budget
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_leaving = False
        """Each connection is closed after its next answer."""
        self._date = (0, b"")

    def date(self) -> bytes:
        """The line that says when an answer was made."""
        second = int(time.time())
        if self._date[0] != second:
            self._date = (second, b"date: %s\r\n" % formatdate(second, usegmt=True).encode())
        return self._date[1]


class Exchange:
    """One request, and its answer. `headers` have names in lower case; `added` are headers for whatever answer it gets;
    `peer` is the address that it came from.

    `gone` is done once the client has left before the end of the answer, `status` is that of the answer, or 0.
    """

    def __init__(
        self, connection: "HttpConnection", parser: httptools.HttpRequestParser, target: bytes, headers: list[Header]
    ) -> None:
        url = httptools.parse_url(target)
        path = url.path.decode("ascii")
        self.method = parser.get_method().decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.query = (url.query or b"").decode("latin-1")
        self.headers = headers
        self.added: list[Header] = []
        self.peer = connection.peer
        self.budget = connection.served.budget
        # HTTP/1.0 knows none, and few of its clients keep a connection (RFC 9112, 6.1 and 9.3).
        self._takes_chunks = parser.get_http_version() == "1.1"
        self.keeps_alive = self._takes_chunks and parser.should_keep_alive()
        self.gone: asyncio.Future[None] = connection.loop.create_future()
        self.status = 0
        self.body = bytearray()
        self.is_whole = False
        """All of the body has come."""
        self.is_over = False
        """All of the answer is written."""
        self.is_late = False
        """The rest of the body is not waited for any longer."""
        self._connection = connection
        self._is_chunked = False
        self._news: asyncio.Future[None] | None = None
        self._asks_first = any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)

    async def read(self) -> tuple[bytes, bool]:
        """More of the body, and whether that was the last of it; waits only until there is any. `gone` ends it, too."""
        if self._asks_first and not self.gone.done():
            self._asks_first = False
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.body or self.is_whole or self.gone.done()):
            self._connection.read_on()
            self._news = self._connection.loop.create_future()
            await self._news
        body, self.body = bytes(self.body), bytearray()
        return body, self.is_whole

    def tell(self) -> None:
        """There is news for who reads."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def leave(self) -> None:
        """The client has left."""
        if not self.gone.done():
            self.gone.set_result(None)
        self.tell()

    def begin(self, status: int, headers: Iterable[Header], num_bytes: int | None) -> None:
        """The head of the answer, whose body has so many bytes, or is as long as it turns out to be."""
        if self.gone.done():
            return
        self.status = status
        lines = [_STATUS_LINES[status], self._connection.served.date()]
        lines += [b"%s: %s\r\n" % header for header in (*headers, *self.added)]
        if num_bytes is not None:
            lines.append(b"content-length: %d\r\n" % num_bytes)
        elif self._takes_chunks:
            # Else the end of the body is that of the connection.
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        # A body that is not going to come is in the way of the next request.
        self.is_late |= self._asks_first and not self.is_whole
        if self.is_late or self._connection.served.is_leaving:
            self.keeps_alive = False
        if not self.keeps_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._connection.transport.write(b"".join(lines))

    @property
    def is_paused(self) -> bool:
        """The client reads too slowly."""
        return self._connection.is_paused

    async def keeps_up(self) -> None:
        """Return once the client has read enough of what was written, or has left."""
        await self._connection.writable.wait()

    def write(self, data: bytes, *, more: bool = True) -> None:
        """A piece of the body of the answer."""
        if self.gone.done():
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = data if more else data + b"0\r\n\r\n"
        if data and self.method != "HEAD":
            self._connection.transport.write(data)
        if not more:
            self.is_over = True
            self._connection.answered()

    def cut(self) -> None:
        """End the connection now, whatever is still to be sent."""
        # Not `close`, which waits until the buffer is sent.
        self._connection.transport.abort()


class HttpConnection(asyncio.Protocol):
    """A client's connection, from `peer`."""

    def __init__(self, served: Served, peer: Peer, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.served = served
        self.peer = peer[0]
        self.loop = loop or asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = self.loop.create_future()
        """Done once a request has come, or none will."""
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self.writable = asyncio.Event()
        self.writable.set()
        self.transport: asyncio.Transport
        self._parser = self._new_parser()
        # Those not answered yet, the first of which is being answered; and the one whose body is coming.
        self._line: deque[Exchange] = deque()
        self._arriving: Exchange | None = None
        self._in_line: ArrivingBody | None = None
        self._target = b""
        self._headers: list[Header] = []
        self._has_begun = False
        self._has_ended = False
        self._is_deaf = False
        self._is_unread = False
        self._num_head_bytes = 0
        self._num_else_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: tuple[Callable[[], None], float] | None = None

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request that is the last of its connection is dropped, and is no reason not to answer it.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def is_paused(self) -> bool:
        return not self.writable.is_set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - of a stream
        self.transport = transport
        self.served.connections.add(self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.served.connections.discard(self)
        self.closed.set_result(None)
        self._is_deaf = True
        self._tell_asked()
        self._forget_line()
        if self._line:
            self._line[0].leave()
        self.writable.set()
        if self._timer is not None:
            self._timer.cancel()
        # What refers back to this connection: a cycle waits for the garbage collector.
        del self._parser
        self._line, self._arriving, self._awaited = deque(), None, None

    def data_received(self, data: bytes) -> None:
        # Data may still come while the answers that are owed are written.
        if self._is_deaf:
            return
        self._has_ended = False
        # The callbacks subtract what they are given. What is left are incomplete lines, which the parser keeps, and
        # what it drops: extensions of chunks, spaces.
        self._num_else_bytes += len(data)
        try:
            self._parse(data)
        except _NotTaken as refusal:
            self._refuse(BadRequest(str(refusal), code="invalid_http"))
        except httptools.HttpParserError as error:
            # What a callback raises comes out of the parser as the context of an error of its own.
            why = error.__context__
            said = str(why) if isinstance(why, _NotTaken) else "This is not a valid HTTP request."
            self._refuse(BadRequest(said, code="invalid_http"))
        in_head = self._arriving is None and self._has_begun
        if self._num_else_bytes + (self._num_head_bytes if in_head else 0) > MAX_HEAD_BYTES and not self._is_deaf:
            self._refuse(BadRequest(_TOO_LONG if in_head else _TOO_MUCH_ELSE, code="invalid_http"))
        # Bytes after the end of a message are less than one read; counting starts anew with the next read.
        self._num_else_bytes = 0 if self._has_ended else max(0, self._num_else_bytes)
        self._watch()

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        self._has_begun = True
        self._target, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer. Trailers count as part of the head and are dropped, since nobody reads them."""
        # The colon, a space, and the end of the line.
        self._count_head(len(name) + len(value) + 4)
        if self._arriving is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            # The head is parsed once more, see `_parse`.
            return
        if self._is_deaf:
            raise _NotTaken("This connection is closed.")
        if len(self._line) > MAX_PIPELINED:
            raise _NotTaken(f"More than {MAX_PIPELINED} requests are queued on this connection.")
        self._check_head()
        self._arriving = Exchange(self, self._parser, self._target, self._headers)
        self._line.append(self._arriving)
        self._tell_asked()
        if len(self._line) == 1:
            self._begin()

    def on_chunk_header(self) -> None:
        self._num_else_bytes -= CHUNK_LINES_BYTES

    def on_body(self, body: bytes) -> None:
        self._num_else_bytes -= len(body)
        exchange = self._arriving
        assert exchange is not None, "a body has a head"
        if exchange.is_over:
            return
        if exchange is not self._line[0]:
            # Counted here until its request's turn comes: then the request reads and counts it.
            self._count_in_line(len(body))
        exchange.body += body
        if len(exchange.body) > _MAX_UNREAD_BYTES and not self._is_unread:
            self._is_unread = True
            self.transport.pause_reading()
        exchange.tell()

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        exchange, self._arriving = self._arriving, None
        assert exchange is not None, "a message has a head"
        self._has_ended, self._has_begun = True, False
        exchange.is_whole = True
        exchange.tell()
        if exchange.is_over and not exchange.keeps_alive:
            self._end()

    def answered(self) -> None:
        """An answer was given. If its request's body still goes on, that is read for a while and dropped: closing a
        connection while its client sends would lose the answer.
        """
        exchange = self._line.popleft()
        if not exchange.keeps_alive and (exchange.is_whole or exchange.is_late or self._is_deaf):
            self._end()
            return
        self.read_on()
        if self._line:
            self._begin()
        self._watch()

    def read_on(self) -> None:
        """Somebody takes what comes."""
        if self._is_unread:
            self._is_unread = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.writable.clear()
        self._watch()

    def resume_writing(self) -> None:
        self.writable.set()
        self._watch()

    def shut(self) -> None:
        """Close it, if it has no request that is to be answered first."""
        if not self._line:
            self._close()

    def _begin(self) -> None:
        """Have the first in line answered."""
        if len(self._line) == 1:
            self._forget_line()
        exchange = self._line[0]
        task = self.loop.create_task(self.served.answer(exchange))
        self.served.tasks.add(task)
        task.add_done_callback(partial(self._is_done, exchange))

    def _is_done(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        self.served.tasks.discard(task)
        if not (exchange.is_over or exchange.gone.done()):
            # It was cancelled, or is at fault: its client must not wait for the rest.
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, after the answers that are still owed to earlier requests; nothing more is read."""
        if self._is_deaf:
            return
        self._is_deaf = True
        refused = self._line[0] if self._line else self._arriving
        if refused is not None:
            # Too much that is neither head nor body may have come with the end of the one request that there is.
            is_its_own = len(self._line) == 1 and self._num_else_bytes > MAX_HEAD_BYTES
            if self._line and refused.is_whole and not is_its_own:
                self._line[-1].keeps_alive = False
                return
            # What cannot be read belongs to the request being answered.
            refused.leave()
        # Nothing else can be written into the middle of an answer, or after it; it ends where it is.
        if refused is None or not refused.status:
            # The part of the head that has come may contain its names.
            names = names_of(dict(self._headers))
            body = error.body(names.ours)
            lines = [_STATUS_LINES[error.status], self.served.date()]
            lines += [b"%s: %s\r\n" % header for header in names.headers()]
            lines += [b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)]
            self.transport.write(b"".join(lines) + b"connection: close\r\n\r\n" + body)
        self._end()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes all that follows an offered upgrade for another protocol, but a server may ignore the
                # offer. Some clients (Java's) make one with their first request, and what follows is its body.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = self._new_parser()

    def _check_head(self) -> None:
        """Raises `_NotTaken` for what the parser lets pass and this server refuses."""
        version = self._parser.get_http_version()
        hosts = [value for name, value in self._headers if name == b"host"]
        encodings = [value for name, value in self._headers if name == b"transfer-encoding"]
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
        method, version = self._parser.get_method(), self._parser.get_http_version()
        if method == b"CONNECT":
            raise _NotTaken("CONNECT is not supported: this server is not a proxy.")
        lines = [b"%s %s HTTP/%s" % (method, self._target, version.encode())]
        lines += [b"%s: %s" % pair for pair in self._headers if pair[0] not in _OF_UPGRADES]
        if not self._parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _tell_asked(self) -> None:
        if not self.asked.done():
            self.asked.set_result(None)

    def _count_in_line(self, num_bytes: int) -> None:
        now = self.loop.time()
        if self._in_line is None:
            self._in_line = self.served.budget.open(client_of(self.peer), now)
        if self._in_line is None or not self._in_line.take(num_bytes, now):
            raise _NotTaken("Too many request bodies are queued on this connection.")

    def _forget_line(self) -> None:
        if self._in_line is not None:
            self._in_line.close()
            self._in_line = None

    def _watch(self) -> None:
        """Have the timer wait for what is to come next; if that is what it waits for, it is not set anew."""
        awaited = self._next_wait()
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if awaited is None else self.loop.call_later(awaited[1], awaited[0])

    def _next_wait(self) -> tuple[Callable[[], None], float] | None:
        """What is done if it does not come, and when."""
        if self.is_paused:
            return self.transport.abort, READER_TIMEOUT_S
        if self._line or self._is_deaf:
            return None
        if self._arriving is not None:
            return self._close, LINGER_S
        if self._has_begun or not self.asked.done():
            return self._head_is_late, HEAD_TIMEOUT_S
        return self._close, KEEP_ALIVE_S

    def _head_is_late(self) -> None:
        if self._has_begun and not self.transport.get_write_buffer_size():
            self._refuse(TooSlow(f"The request's head did not arrive within {HEAD_TIMEOUT_S:g} s."))
        else:
            # There is no request, and an unsolicited answer may be taken for the answer to one that is just being sent.
            self._close()

    def _close(self) -> None:
        # What `_end` waits for never happens if the client reads nothing.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        self._end()

    def _end(self) -> None:
        """Read nothing more, and close once everything has been sent."""
        self._is_deaf = True
        self.transport.close()
