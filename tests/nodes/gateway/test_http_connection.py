"""HTTP on one connection, over a recorded transport and a clock that is turned by hand: its timers, its refusals."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nodes.gateway.config import GatewayConfig
from nodes.gateway.http.bodies import BodyBudget
from nodes.gateway.http.connection import (
    HEAD_TIMEOUT_S,
    KEEP_ALIVE_S,
    LINGER_S,
    MAX_HEAD_BYTES,
    READER_TIMEOUT_S,
    Exchange,
    HttpConnection,
    Served,
)

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"


class Timer:
    """A call that is due later."""

    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.delay_s, self.call, self.is_cancelled = delay_s, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandTurnedLoop:
    """What the protocol asks of a loop."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []
        self.loop = asyncio.get_running_loop()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay_s, call))
        return self.timers[-1]

    def create_task(self, *args: Any, **more: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(*args, **more)

    def create_future(self) -> asyncio.Future[Any]:
        return self.loop.create_future()

    def time(self) -> float:
        return 0.0

    def ring(self, delay_s: float) -> None:
        """The one call that is due then."""
        (timer,) = self.due(delay_s)
        timer.call()

    def due(self, delay_s: float) -> list[Timer]:
        return [one for one in self.timers if one.delay_s == delay_s and not one.is_cancelled]


class RecordedTransport:
    """What was written, and how it ended."""

    def __init__(self) -> None:
        self.written = b""
        self.unread = 0
        self.end = ""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.end = self.end or "closed"

    def abort(self) -> None:
        self.end = "aborted"

    def is_closing(self) -> bool:
        return bool(self.end)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, _name: str) -> Any:
        return None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Undated(Served):
    """Answers do not say when they were made, so that they can be compared."""

    def date(self) -> bytes:
        return b""


class Connection:
    """One connection, whose requests are answered when that is let."""

    def __init__(self, budget: GatewayConfig | None = None) -> None:
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.ends: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.loop = HandTurnedLoop()
        self.budget = BodyBudget(budget or GatewayConfig(model_name="x", context_length=1))
        self.served = Undated(self.app, self.budget)
        self.protocol = HttpConnection(self.served, ("192.0.2.1", 4000), self.loop)
        self.transport = RecordedTransport()
        self.protocol.connection_made(self.transport)

    async def app(self, exchange: Exchange) -> None:
        self.asked.append(exchange.method)
        self.headers.append(dict(exchange.headers))
        body, is_last = b"", False
        while not is_last:
            piece, is_last = await exchange.read()
            if exchange.gone.done():
                self.ends.append("disconnected")
                return
            body += piece
        self.bodies.append(body)
        await self.may_answer.wait()
        exchange.begin(200, [], 2)
        exchange.write(b"ok", more=False)
        self.ends.append("answered")

    async def take(self, *parts: bytes) -> bytes:
        for part in parts:
            self.protocol.data_received(part)
        await settle()
        return self.transport.written


@pytest.fixture
def one() -> Callable[..., None]:
    """A connection; for tests that are coroutine functions, on whose loop it is."""

    async def connected(test: Callable[..., Any]) -> None:
        await test(Connection())

    return lambda test: asyncio.run(connected(test))


async def settle() -> None:
    """Until every task that can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_head_has_its_time() -> None:
    one = Connection()
    one.loop.ring(HEAD_TIMEOUT_S)
    assert (one.transport.end, one.transport.written) == ("closed", b""), "nothing was asked, and nothing is said"
    one.protocol.connection_lost(None)

    one = Connection()
    await one.take(GET + b"\r\n")
    assert one.loop.due(HEAD_TIMEOUT_S) == []
    one.transport.written = b""
    await one.take(b"GET / HT")
    (timer,) = one.loop.due(HEAD_TIMEOUT_S)
    await one.take(b"TP/1.1\r\nX-Request-Id: mine\r\nA")
    assert one.loop.due(HEAD_TIMEOUT_S) == [timer], "more of it does not give it more time"
    timer.call()
    head, body = one.transport.written.split(b"\r\n\r\n")
    error = msgspec.json.decode(body)["error"]
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"x-request-id: mine\r\n" in head
    assert b"x-kvmesh-request-id: " + error["request_id"].encode() in head
    assert (error["code"], "within 30 s" in error["message"]) == ("request_timeout", True)
    assert one.transport.end == "closed"

    unread = Connection()
    await unread.take(b"GET / HT")
    unread.transport.unread = 5
    unread.loop.ring(HEAD_TIMEOUT_S)
    assert unread.transport.end == "aborted"


async def test_the_next_head_may_be_late_while_an_answer_is_under_way(one: Connection) -> None:
    one.may_answer.clear()
    await one.take(GET + b"\r\n", b"GET / HT")
    assert one.loop.due(HEAD_TIMEOUT_S) == []
    one.may_answer.set()
    await settle()
    assert (one.ends, one.transport.end) == (["answered"], "")
    one.loop.ring(HEAD_TIMEOUT_S)
    assert b"HTTP/1.1 408" in one.transport.written


async def test_who_reads_nothing_is_cut_off_but_not_who_catches_up() -> None:
    one = Connection()
    one.protocol.pause_writing()
    (timer,) = one.loop.due(READER_TIMEOUT_S)
    one.protocol.resume_writing()
    assert timer.is_cancelled
    one.protocol.pause_writing()
    one.loop.ring(READER_TIMEOUT_S)
    assert one.transport.end == "aborted"
    one.protocol.connection_lost(None)

    gone = Connection()
    gone.protocol.pause_writing()
    (timer,) = gone.loop.due(READER_TIMEOUT_S)
    gone.protocol.connection_lost(None)
    assert timer.is_cancelled


class Streaming(Connection):
    """Begins a stream, and writes its pieces."""

    async def app(self, exchange: Exchange) -> None:
        self.gone = exchange.gone
        exchange.begin(200, [], None)
        for blocked in (False, True, False):
            if blocked:
                self.protocol.pause_writing()
            self.asked.append(str(exchange.is_paused))
            if blocked:
                self.protocol.resume_writing()
        exchange.write(b"0123456789")
        await self.may_answer.wait()
        exchange.write(b"late")
        exchange.write(b"end", more=False)


async def test_a_piece_is_written_at_once() -> None:
    one = Streaming()
    written = await one.take(GET + b"\r\n")
    assert one.asked == ["False", "True", "False"]
    assert not one.gone.done()
    assert written.endswith(b"\r\n\r\na\r\n0123456789\r\n4\r\nlate\r\n3\r\nend\r\n0\r\n\r\n")
    gone = Streaming()
    gone.may_answer.clear()
    before = await gone.take(GET + b"\r\n")
    assert not gone.gone.done()
    gone.protocol.connection_lost(None)
    assert gone.gone.done()
    gone.may_answer.set()
    await settle()
    assert gone.transport.written == before


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n"])
async def test_a_stream_of_http_1_0_is_not_chunked_and_ends_with_the_connection(more: bytes) -> None:
    one = Streaming()
    one.may_answer.clear()
    request = GET.replace(b"1.1", b"1.0") + more + b"\r\n"
    assert await one.take(request) == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n0123456789"
    assert one.transport.end == ""
    one.may_answer.set()
    await settle()
    assert one.transport.written.endswith(b"\r\n\r\n0123456789lateend")
    assert one.transport.end == "closed"


async def test_an_answer_of_known_length_is_the_same_for_http_1_0(one: Connection) -> None:
    written = await one.take(GET.replace(b"1.1", b"1.0") + b"\r\n")
    assert written == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
    assert (one.ends, one.transport.end) == (["answered"], "closed")


@pytest.mark.parametrize("unread", [0, 5])
async def test_a_silent_client_is_left_at_once_if_it_does_not_read(one: Connection, unread: int) -> None:
    await one.take(GET + b"\r\n")
    one.transport.unread = unread
    one.loop.ring(KEEP_ALIVE_S)
    assert one.transport.end == ("aborted" if unread else "closed")


async def test_an_upgrade_is_not_taken_and_its_body_is_read(one: Connection) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"
    assert (await one.take(head + b"Content-Length: 5\r\n\r\nhello")).startswith(b"HTTP/1.1 200 OK")
    assert one.bodies == [b"hello"]
    assert not {b"upgrade", b"http2-settings"} & set(one.headers[0])
    assert one.transport.end == ""


async def test_an_upgrade_that_closes_is_closed(one: Connection) -> None:
    written = await one.take(b"GET / HTTP/1.0\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert written.startswith(b"HTTP/1.1 200 OK")
    assert one.transport.end == "closed"


async def test_this_is_no_proxy(one: Connection) -> None:
    refusal = await one.take(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (refusal[:12], b"this server is not a proxy" in refusal) == (b"HTTP/1.1 400", True)
    assert (one.transport.end, one.asked) == ("closed", [])
    assert await one.take(GET + b"\r\n") == refusal, "it does not listen any more"


async def test_what_cannot_be_read_waits_for_the_answers_that_are_owed(one: Connection) -> None:
    one.may_answer.clear()
    assert await one.take(GET + b"\r\n", b"\x00 nonsense\r\n\r\n") == b""
    assert one.transport.end == ""
    one.may_answer.set()
    await settle()
    assert one.transport.written.startswith(b"HTTP/1.1 200 OK")
    assert one.transport.end == "closed"


async def test_a_body_that_cannot_be_read_ends_its_own_request(one: Connection) -> None:
    assert (await one.take(CHUNKED, b"zz\r\n")).startswith(b"HTTP/1.1 400")
    assert (one.ends, one.transport.end) == (["disconnected"], "closed")


async def test_trailers_are_dropped(one: Connection) -> None:
    assert (await one.take(CHUNKED + b"0\r\nX-Late: 1\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    assert one.bodies == [b"ab"]
    assert b"x-late" not in one.headers[0]


async def test_who_is_answered_hears_that_the_client_left(one: Connection) -> None:
    await one.take(POST % 9 + b"ab")
    one.protocol.connection_lost(None)
    await settle()
    assert one.ends == ["disconnected"]


async def test_newcomers_are_those_who_have_asked_nothing() -> None:
    one = Connection()
    assert not one.protocol.asked.done()
    await one.take(GET + b"\r\n")
    assert one.protocol.asked.done()
    gone = Connection()
    gone.protocol.connection_lost(None)
    assert gone.protocol.asked.done(), "and those who never will are none"


async def test_heads_are_bounded(one: Connection) -> None:
    line = b"X: " + b"x" * 9000 + b"\r\n"
    await one.take(GET)
    for _ in range(MAX_HEAD_BYTES // len(line)):
        assert await one.take(line) == b""
    await one.take(line)
    assert one.transport.written.startswith(b"HTTP/1.1 400")
    assert one.transport.end == "closed"


async def test_a_head_over_the_limit_is_refused_however_it_is_cut() -> None:
    """One read may bring more than a head may have: what has its end is counted, too."""
    size = len(GET) + len(b"X: \r\n\r\n")
    most = GET + b"X: " + b"x" * (MAX_HEAD_BYTES - size) + b"\r\n\r\n"
    one = Connection()
    assert (await one.take(most)).startswith(b"HTTP/1.1 200 OK")
    assert (await one.take(most)).count(b"HTTP/1.1 200 OK") == 2, "each has as much"
    many_lines = GET + b"X: 12345\r\n" * 7000 + b"\r\n"
    for head in (GET + b"X: " + b"x" * 70_000 + b"\r\n\r\n", many_lines, b"GET /" + b"x" * 70_000 + most[5:]):
        for parts in ((head,), (head[:60_000], head[60_000:])):
            one = Connection()
            assert (await one.take(*parts)).startswith(b"HTTP/1.1 400")
            assert b"longer than 65536 bytes" in one.transport.written
            assert (one.transport.end, one.asked) == ("closed", [])


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "exactly one Host header"),
        (GET + b"Host: y\r\n", "exactly one Host header"),
        (b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n", "exactly one Host header"),
        (b"GET / HTTP/1.1\r\nHost: x y\r\n", "a host name or an address"),
        (b"GET / HTTP/1.1\r\nHost: x/y\r\n", "a host name or an address"),
        (b"GET /x\r\n", "Unsupported HTTP version"),
        (b"GET /x HTTP/0.9\r\nHost: x\r\n", "Unsupported HTTP version"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", "'chunked' alone"),
        (GET + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "not a valid HTTP request"),
        (b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n", "'chunked' alone"),
    ],
)
async def test_what_others_may_understand_otherwise_is_refused(one: Connection, head: bytes, why: str) -> None:
    answer, body = (await one.take(head + b"\r\n")).split(b"\r\n\r\n")
    error = msgspec.json.decode(body)["error"]
    assert answer.startswith(b"HTTP/1.1 400")
    assert (error["code"], why in error["message"]) == ("invalid_http", True)
    assert b"x-request-id: " + error["request_id"].encode() in answer, "ours, where the client has none"
    assert (one.transport.end, one.asked) == ("closed", [])


HIDDEN = b"DELETE /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
TO = b"POST / HTTP/1.1\r\nHost: x\r\n"
BOTH = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\n" + BOTH,
        BOTH + b"Content-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 18446744073709551621\r\n",
        b"Content-Length : 5\r\n",
        b" Content-Length: 5\r\n",
        b"Content-Length: 5\n",
        b"X: a\nContent-Length: 5\r\n",
        b"X: a\rContent-Length: 5\r\n",
        b"X: a\r\n Content-Length: 5\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: identity\r\n" + BOTH,
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"X: a\0b\r\n",
    ],
)
async def test_no_request_hides_behind_a_length_that_can_be_read_in_two_ways(one: Connection, lines: bytes) -> None:
    written = await one.take(TO + lines + b"\r\n0\r\n\r\n" + HIDDEN)
    assert written.startswith(b"HTTP/1.1 400")
    assert (one.asked, written.count(b"\r\n\r\n"), one.transport.end) == ([], 1, "closed")


@pytest.mark.parametrize(
    "chunks",
    [
        b"ffffffffffffffff1\r\nab\r\n0\r\n\r\n",
        b"10000000000000002\r\nab\r\n0\r\n\r\n",
        b"-2\r\nab\r\n0\r\n\r\n",
        b"0x2\r\nab\r\n0\r\n\r\n",
        b"2 \r\nab\r\n0\r\n\r\n",
        b"2\nab\n0\n\n",
        b"2\r\nabc\r\n0\r\n\r\n",
        b"2;\nab\r\n0\r\n\r\n",
        b"\r\n2\r\nab\r\n0\r\n\r\n",
    ],
)
async def test_no_request_hides_behind_a_chunk_that_can_be_read_in_two_ways(one: Connection, chunks: bytes) -> None:
    written = await one.take(TO + BOTH + b"\r\n" + chunks + HIDDEN)
    assert written.startswith(b"HTTP/1.1 400")
    assert (one.ends, written.count(b"HTTP/1.1 "), one.transport.end) == (["disconnected"], 1, "closed")
    assert "DELETE" not in one.asked


async def test_a_chunk_of_any_size_is_body_until_it_ends(one: Connection) -> None:
    """The most that the parser counts: all that follows is body, which `call.py` bounds."""
    assert await one.take(TO + BOTH + b"\r\nffffffffffffffff\r\n" + HIDDEN) == b""
    assert one.asked == ["POST"]


async def test_what_follows_the_last_request_of_a_connection_is_dropped(one: Connection) -> None:
    written = await one.take(TO + b"Connection: close\r\nContent-Length: 0\r\n\r\n" + HIDDEN)
    assert written.count(b"HTTP/1.1 200 OK") == written.count(b"HTTP/1.1 ") == 1
    assert (one.asked, one.transport.end) == (["POST"], "closed")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.0\r\n",
        b"GET / HTTP/1.1\r\nHost:\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n",
        b"GET / HTTP/1.1\r\nHost: a_b.example:8000\r\n",
        b"\r\n\r\n" + GET,
    ],
)
async def test_what_everybody_understands_is_not(one: Connection, head: bytes) -> None:
    assert (await one.take(head + b"\r\n")).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "rest",
    [
        b"2;x=" + b"x" * 70_000 + b"\r\ncd\r\n0\r\n\r\n",
        b"2;x=12345678901234567890\r\ncd\r\n" * 8000 + b"0\r\n\r\n",
        b"0\r\nX-Late: " + b"x" * 70_000 + b"\r\n\r\n",
        b"0\r\n" + b"X-Late: 12345678901234567890\r\n" * 3000 + b"\r\n",
    ],
)
@pytest.mark.parametrize("size", [1 << 20, 30_000])
async def test_what_is_neither_head_nor_body_is_bounded_in_all(one: Connection, rest: bytes, size: int) -> None:
    data = CHUNKED + rest
    assert (await one.take(*[data[at : at + size] for at in range(0, len(data), size)])).startswith(b"HTTP/1.1 400")
    assert (one.transport.end, one.bodies) == ("closed", [])


async def test_a_body_in_tiny_pieces_and_many_requests_are_not(one: Connection) -> None:
    await one.take(CHUNKED, *[b"1\r\nx\r\n" * 5000] * 10, b"0\r\n\r\n")
    assert one.bodies == [b"ab" + b"x" * 50_000]
    for _ in range(500):
        await one.take(*[GET + b"X:   spaces \r\n\r\n"] * 10)
    assert (len(one.asked), one.transport.end) == (5001, "")


async def test_lines_within_a_body_are_bounded() -> None:
    """The parser keeps a trailer until it has its end, and there is no end to an extension."""
    for line in (b"0\r\nX-Late: ", b"2;x="):
        one = Connection()
        await one.take(CHUNKED)
        for _ in range(6):
            assert await one.take(line.ljust(10_000, b"x")) == b""
            line = b""
        assert (await one.take(b"x" * 10_000)).startswith(b"HTTP/1.1 400")
        assert (one.transport.end, one.ends) == ("closed", ["disconnected"])
    one = Connection()
    await one.take(CHUNKED, *[b"2\r\nab\r\n" * 1000] * 100)
    assert one.transport.end == "", "pieces of a body may be many"


class Early(Connection):
    """Answers before it has the body."""

    async def app(self, exchange: Exchange) -> None:
        exchange.begin(200, [], 2)
        exchange.write(b"ok", more=False)


class Overloaded(Connection):
    """Answers with a status that HTTP has no phrase for."""

    async def app(self, exchange: Exchange) -> None:
        exchange.begin(529, [], 0)
        exchange.write(b"", more=False)


async def test_a_status_needs_no_phrase() -> None:
    assert await Overloaded().take(GET + b"\r\n") == b"HTTP/1.1 529 \r\ncontent-length: 0\r\n\r\n"


async def test_a_body_goes_on_for_a_while_after_its_answer_and_no_longer() -> None:
    one = Early()
    assert (await one.take(POST % 100 + b"x")).startswith(b"HTTP/1.1 200 OK")
    (timer,) = one.loop.due(LINGER_S)
    await one.take(b"x" * 50)
    assert one.transport.end == ""
    assert one.loop.due(LINGER_S) == [timer], "more of it does not give it more time"
    timer.call()
    assert one.transport.end == "closed"
    one.protocol.connection_lost(None)

    one = Early()
    await one.take(POST % 100 + b"x")
    await one.take(b"x" * 99)
    assert one.loop.due(LINGER_S) == []
    assert one.loop.due(KEEP_ALIVE_S), "nor may it stay for ever because it was in time"
    assert (await one.take(GET + b"\r\n")).count(b"HTTP/1.1 200 OK") == 2

    gone = Early()
    await gone.take(POST % 100 + b"x")
    gone.protocol.connection_lost(None)
    assert gone.loop.due(LINGER_S) == []


async def test_the_last_answer_of_a_connection_is_not_lost_to_a_body_that_goes_on() -> None:
    one = Early()
    written = await one.take(POST.replace(b"Host: x", b"Host: x\r\nConnection: close") % 100 + b"x")
    assert written.endswith(b"connection: close\r\n\r\nok")
    assert (one.transport.end, len(one.loop.due(LINGER_S))) == ("", 1)
    one.transport.unread = 5
    await one.take(b"x" * 99)
    assert one.transport.end == "closed", "not aborted: the client may still read its answer"
    assert one.loop.due(LINGER_S) == []


async def test_a_body_that_its_client_holds_back_is_not_waited_for() -> None:
    one = Early()
    head = POST.replace(b"Host: x", b"Host: x\r\nExpect: 100-continue") % 100
    assert (await one.take(head)).endswith(b"connection: close\r\n\r\nok")
    assert one.transport.end == "closed"


async def test_the_next_in_line_is_not_hurried_by_the_answer_before_it(one: Connection) -> None:
    one.may_answer.clear()
    await one.take(GET + b"\r\n" + POST % 100 + b"x")
    one.may_answer.set()
    await settle()
    assert one.ends == ["answered"]
    assert one.loop.due(LINGER_S) == []
    await one.take(b"x" * 99)
    assert one.ends == ["answered", "answered"]


async def test_bodies_in_line_are_counted_and_bounded() -> None:
    budget = GatewayConfig(model_name="x", context_length=1, max_buffered_bytes=100_000)
    one = Connection(budget)
    one.may_answer.clear()
    body = b"x" * 30_000
    await one.take(GET + b"\r\n", POST % len(body) + body, POST % len(body) + body)
    assert one.budget.num_bytes == 60_000
    await one.take(POST % len(body) + body[:-1])
    assert one.budget.num_bytes == 89_999
    one.protocol.connection_lost(None)
    assert (one.budget.num_bytes, one.budget.num_bodies) == (0, 0)

    one = Connection(budget)
    one.may_answer.clear()
    await one.take(GET + b"\r\n", *[POST % len(body) + body] * 4)
    assert one.budget.num_bytes == 90_000
    one.may_answer.set()
    await settle()
    assert one.ends == ["answered"] * 4, "what was too much is not read, what was before it is answered"
    assert (one.budget.num_bytes, one.budget.num_bodies) == (0, 0)
