"""Sockets: ports that cannot be had, and connections that misuse theirs."""

import asyncio
import socket

import msgspec
import pytest

from mesh.errors import BindError
from nodes.gateway.actor import Gateway
from nodes.gateway.http import connection, server
from nodes.gateway.http.bodies import BodyBudget
from nodes.gateway.http.connection import Served
from nodes.gateway.http.server import HttpServer, bind
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, Ring


def test_a_taken_port_says_what_to_do() -> None:
    with bind(CONFIG) as listener:
        taken = msgspec.structs.replace(CONFIG, port=listener.getsockname()[1])
        with pytest.raises(BindError, match=r"is taken by another process. Stop that one, or set another --port"):
            bind(taken)


def test_a_shared_port() -> None:
    config = msgspec.structs.replace(CONFIG, reuse_port=True)
    with bind(config) as first:
        shared = msgspec.structs.replace(config, port=first.getsockname()[1])
        with bind(shared) as second:
            assert second.getsockname() == first.getsockname()


@pytest.mark.parametrize(
    ("host", "words"), [("192.0.2.1", "Set another --host or --port"), ("no such host", "is not an address")]
)
def test_an_address_that_is_not_ours_or_none(host: str, words: str) -> None:
    with pytest.raises(BindError, match=words):
        bind(msgspec.structs.replace(CONFIG, host=host))


def test_a_port_without_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", denied)
    with pytest.raises(BindError, match="1023"):
        bind(CONFIG)


def test_a_server_that_never_started_closes_its_socket() -> None:
    async def answer(*_: object) -> None:
        raise AssertionError

    listener = bind(CONFIG)
    asyncio.run(HttpServer(Served(answer, BodyBudget(CONFIG)), listener, 1, print).stop())
    assert listener.fileno() == -1


def test_a_gateway_that_never_started_is_harmless() -> None:
    gateway = Gateway(CONFIG)
    assert gateway.stats() == {}
    gateway.on_members([], [], [])
    gateway.on_peer_lost(object(), "x")
    asyncio.run(gateway.stop())


async def read_all(ring: Ring, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_heads_are_bounded_in_length_and_time(ring, client, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000
    assert (await read_all(ring, endless))[:12] in (b"HTTP/1.1 400", b"")
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    assert await read_all(ring, b"") == b""
    for slow in (b"GET / HT", b"GET /health/live HTTP/1.1\r\nHost: x\r\n"):
        assert (await read_all(ring, slow)).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port)
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"}")
    writer.write(b"GET /heal")
    assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
    writer.close()


async def test_requests_on_one_connection_are_answered_in_turn(ring, client) -> None:
    one = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await read_all(ring, one * 3 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.endswith(b"}")


async def test_requests_in_line_are_bounded(ring, client) -> None:
    """So many as may be are answered, what follows is not read, and the connection is closed."""

    answer = await read_all(ring, b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"HTTP/1.1 ") == connection.MAX_PIPELINED + 1
    assert (await read_all(ring, b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).endswith(b"}")


def completion(text: str) -> bytes:
    body = b'{"model": "bytes", "prompt": "%s", "max_tokens": 20}' % text.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


@pytest.mark.settings(reuse_port=True)
async def test_who_shares_a_port_serves_whoever_is_connected_before_it_goes(ring, client) -> None:
    """Nobody is told 503 whose connection the kernel gave to this gateway and not to another one."""

    port = ring.gateway.port
    kept = await asyncio.open_connection("127.0.0.1", port)
    kept[1].write(completion("before"))
    before = await kept[0].readuntil(b"}}}")
    assert b"connection: close" not in before
    new = await asyncio.open_connection("127.0.0.1", port)
    # Only what has been accepted can be kept.
    await until(lambda: ring.gateway.server.num_connections >= 2)
    draining = asyncio.create_task(ring.gateway.drain())
    await asyncio.sleep(0)
    for (reader, writer), text in ((kept, "still here"), (new, "just came")):
        writer.write(completion(text))
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in answer
        assert text.encode() in answer
        writer.close()
    await asyncio.wait_for(draining, 5)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.settings(reuse_port=True)
async def test_a_silent_newcomer_does_not_hold_up_a_drain(ring, client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "NEWCOMER_S", 0.1)

    _, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port)
    await until(lambda: ring.gateway.server.num_connections >= 1)
    await asyncio.wait_for(ring.gateway.drain(), 5)
    writer.close()
