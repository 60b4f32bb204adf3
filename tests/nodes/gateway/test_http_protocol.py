"""The protocol alone, over a recorded transport and a clock that is turned by hand: its timers, its refusals."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from nodes.gateway import http_protocol
from nodes.gateway.http_protocol import HEAD_TIMEOUT_S, READER_TIMEOUT_S, BoundedHttpProtocol, Newcomers

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


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


class Connection:
    """One connection, with an application that answers when it is let."""

    def __init__(self, **config: Any) -> None:
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.ends: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        configured = uvicorn.Config(
            self.app,
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            access_log=False,
            log_config=None,
            **config,
        )
        configured.load()
        self.loop = HandTurnedLoop()
        self.newcomers = Newcomers()
        self.protocol = BoundedHttpProtocol(
            configured, ServerState(), {}, self.loop, newcomers=self.newcomers  # type: ignore[arg-type]
        )  # fmt: skip
        self.transport = RecordedTransport()
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["method"])
        self.headers.append(dict(scope["headers"]))
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ends.append("disconnected")
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        await self.may_answer.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})
        self.ends.append("answered")

    async def take(self, *parts: bytes) -> bytes:
        for part in parts:
            self.protocol.data_received(part)
        await settle()
        return self.transport.written


async def settle() -> None:
    """Until every task that can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


def in_loop(test: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_a_head_has_its_time() -> None:
    one = Connection()
    (timer,) = one.loop.due(HEAD_TIMEOUT_S)
    timer.call()
    assert one.transport.end == "closed"
    one.protocol.connection_lost(None)

    one = Connection()
    await one.take(GET + b"\r\n")
    assert one.loop.due(HEAD_TIMEOUT_S) == []
    await one.take(b"GET / HT")
    (timer,) = one.loop.due(HEAD_TIMEOUT_S)
    await one.take(b"TP/1.1\r\n")
    assert one.loop.due(HEAD_TIMEOUT_S) == [timer], "more of it does not give it more time"
    timer.call()
    assert one.transport.end == "closed"


@in_loop
async def test_the_next_head_may_be_late_while_an_answer_is_under_way() -> None:
    one = Connection()
    one.may_answer.clear()
    await one.take(GET + b"\r\n", b"GET / HT")
    (timer,) = one.loop.due(HEAD_TIMEOUT_S)
    timer.call()
    assert one.transport.end == ""
    one.may_answer.set()
    await settle()
    assert one.ends == ["answered"]


@in_loop
async def test_who_reads_nothing_is_cut_off_but_not_who_catches_up() -> None:
    one = Connection()
    one.protocol.pause_writing()
    (timer,) = one.loop.due(READER_TIMEOUT_S)
    one.protocol.resume_writing()
    assert timer.is_cancelled
    one.protocol.pause_writing()
    (timer,) = one.loop.due(READER_TIMEOUT_S)
    timer.call()
    assert one.transport.end == "aborted"
    one.protocol.connection_lost(None)

    gone = Connection()
    gone.protocol.pause_writing()
    (timer,) = gone.loop.due(READER_TIMEOUT_S)
    gone.protocol.connection_lost(None)
    assert timer.is_cancelled


@pytest.mark.parametrize("unread", [0, 5])
def test_a_silent_client_is_left_at_once_if_it_does_not_read(unread: int) -> None:
    async def main() -> None:
        one = Connection()
        one.transport.unread = unread
        one.protocol.timeout_keep_alive_handler()
        assert one.transport.end == ("aborted" if unread else "closed")

    asyncio.run(main())


@in_loop
async def test_an_upgrade_is_not_taken_and_its_body_is_read() -> None:
    one = Connection()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"
    written = await one.take(head + b"Content-Length: 5\r\n\r\nhello")
    assert written.startswith(b"HTTP/1.1 200 OK")
    assert one.bodies == [b"hello"]
    assert not {b"upgrade", b"http2-settings"} & set(one.headers[0])
    assert one.transport.end == ""


@in_loop
async def test_an_upgrade_that_closes_is_closed() -> None:
    one = Connection()
    written = await one.take(b"GET / HTTP/1.0\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert written.startswith(b"HTTP/1.1 200 OK")
    assert one.transport.end == "closed"


@in_loop
async def test_this_is_no_proxy() -> None:
    one = Connection()
    refusal = await one.take(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert refusal.startswith(b"HTTP/1.1 400")
    assert one.transport.end == "closed"
    assert one.asked == []
    assert await one.take(GET + b"\r\n") == refusal, "it does not listen any more"


@in_loop
async def test_what_cannot_be_read_waits_for_the_answers_that_are_owed() -> None:
    one = Connection()
    one.may_answer.clear()
    assert await one.take(GET + b"\r\n", b"\x00 nonsense\r\n\r\n") == b""
    assert one.transport.end == ""
    one.may_answer.set()
    await settle()
    assert one.transport.written.startswith(b"HTTP/1.1 200 OK")
    assert one.transport.end == "closed"


@in_loop
async def test_a_body_that_cannot_be_read_ends_its_own_request() -> None:
    one = Connection()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    written = await one.take(head + b"2\r\nab\r\n", b"zz\r\n")
    assert written.startswith(b"HTTP/1.1 400")
    assert one.ends == ["disconnected"]
    assert one.transport.end == "closed"


@in_loop
async def test_trailers_are_dropped() -> None:
    one = Connection()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    written = await one.take(head + b"2\r\nab\r\n0\r\nX-Late: 1\r\n\r\n")
    assert written.startswith(b"HTTP/1.1 200 OK")
    assert one.bodies == [b"ab"]
    assert b"x-late" not in one.headers[0]


@in_loop
async def test_who_is_answered_hears_that_the_client_left() -> None:
    one = Connection()
    await one.take(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab")
    one.protocol.connection_lost(None)
    await settle()
    assert one.ends == ["disconnected"]


@in_loop
async def test_newcomers_are_those_who_have_asked_nothing() -> None:
    one, both = Connection(), Newcomers()
    waiting = asyncio.create_task(one.newcomers.gone(60))
    await settle()
    assert not waiting.done()
    await one.take(GET + b"\r\n")
    await waiting
    other = Connection()
    both.enter(one.protocol)
    both.enter(other.protocol)
    both.leave(one.protocol)
    waiting = asyncio.create_task(both.gone(60))
    await settle()
    assert not waiting.done(), "one is still there"
    both.leave(other.protocol)
    await waiting
    both.enter(other.protocol)
    await both.gone(0.01)


@in_loop
async def test_too_many_connections_are_told_so_in_openais_form() -> None:
    one = Connection(limit_concurrency=1)
    written = await one.take(GET + b"\r\n")
    assert written.startswith(b"HTTP/1.1 503")
    assert b"too_many_connections" in written
    assert b"retry-after: 1" in written
    assert one.asked == []


@in_loop
async def test_heads_are_bounded() -> None:
    one = Connection()
    line = b"X: " + b"x" * 9000 + b"\r\n"
    await one.take(GET)
    for _ in range(http_protocol.MAX_HEAD_BYTES // len(line)):
        assert await one.take(line) == b""
    await one.take(line)
    assert one.transport.written.startswith(b"HTTP/1.1 400")
    assert one.transport.end == "closed"
