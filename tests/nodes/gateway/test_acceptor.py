"""Connections that there is no room for: each has an answer, the log a line, and those that are here go on."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from nodes.gateway.http import acceptor
from nodes.gateway.http.acceptor import Acceptor
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import Ring, play

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connections(ring: Ring, num: int) -> list[Connection]:
    return [await asyncio.open_connection("127.0.0.1", ring.gateway.port) for _ in range(num)]


async def fate(connection: Connection) -> str:
    """What a client that asks nothing is told: a status, `silently closed`, or that it is kept."""
    try:
        answer = await asyncio.wait_for(connection[0].read(), 1.0)
    except TimeoutError:
        return "kept"
    except ConnectionResetError:
        return "reset"
    assert b"too_many_connections" in answer or not answer
    assert b"retry-after: 1\r\n" in answer or not answer
    return answer[9:12].decode() or "silently closed"


def fates(num_kept: int, num_refused: int) -> Counter[str]:
    return Counter({"kept": num_kept, "503": num_refused})


async def leave(opened: list[Connection]) -> None:
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def refusals(ring: Ring) -> float:
    return ring.gateway.ctx.metrics.value("mesh_http_connections_refused_total")


@pytest.mark.settings(max_connections=5)
async def test_one_connection_too_many_is_answered_and_those_before_it_are_served(ring, client) -> None:
    assert (await client.get("/health")).status_code == 200
    kept = await connections(ring, 4)
    await until(lambda: ring.gateway.server.num_connections == 5)
    with structlog.testing.capture_logs() as logs:
        more = await connections(ring, 30)
        assert Counter(await asyncio.gather(*map(fate, kept + more))) == fates(4, 30)
    (line,) = [line for line in logs if line["event"] == "connections_refused"]
    assert "5 connections" in line["why"]
    assert "ulimit -n" in line["do"]
    assert refusals(ring) == 30
    assert (await client.get("/health")).status_code == 200, "its connection was there before"
    await leave(kept + more)
    await until(lambda: ring.gateway.server.num_connections == 1)
    again = await connections(ring, 1)
    assert await fate(again[0]) == "kept"
    await leave(again)


@pytest.mark.settings(max_connections=1)
async def test_who_asks_at_once_reads_the_refusal_too(ring, client) -> None:
    await client.get("/health")
    for _ in range(20):
        opened = await connections(ring, 1)
        ((reader, writer),) = opened
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000\r\n\r\n" + b"x" * 30_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        await leave(opened)


def test_the_last_descriptors_are_no_client_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `ulimit -n` were not far above what is open here, the clients' own ends included."""

    async def scenario(ring: Ring, client: Any) -> None:
        await client.get("/health")
        free = os.dup(0)
        os.close(free)
        monkeypatch.setattr(ring.gateway.server.acceptor, "_max_files", free + 20 + acceptor.RESERVED_FILES)
        with structlog.testing.capture_logs() as logs:
            many = await connections(ring, 60)
            told = Counter(await asyncio.gather(*map(fate, many)))
        assert set(told) == {"kept", "503"}
        assert told["503"] >= 40
        assert any("ulimit -n" in line["why"] for line in logs if line["event"] == "connections_refused")
        assert (await client.get("/health")).status_code == 200
        await leave(many)

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    play(scenario)


class Failing:
    """A listening socket from which nobody can be taken as long as there are `failures`."""

    def __init__(self, listener: socket.socket, failures: list[int]) -> None:
        self.listener = listener
        self.failures = failures

    def fileno(self) -> int:
        return self.listener.fileno()

    def close(self) -> None:
        self.listener.close()

    def accept(self) -> Any:
        if self.failures:
            code = self.failures.pop()
            raise OSError(code, os.strerror(code))
        return self.listener.accept()


async def greeted(monkeypatch: pytest.MonkeyPatch, failures: list[int]) -> list[str]:
    """Who comes while there are failures is taken after them; what the acceptor says of these."""
    monkeypatch.setattr(acceptor, "_PAUSE_S", 0.01)

    class Greeter(asyncio.Protocol):
        def __init__(self, peer: tuple[str, int]) -> None:
            peers.append(peer)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(b"here")
            transport.close()

    whys, peers = list[str](), list[tuple[str, int]]()
    none: Callable[[], int] = lambda: 0  # noqa: E731
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        taking = Acceptor(Failing(listener, failures), Greeter, none, 10, whys.append)
        taking.open()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(reader.read(), 5) == b"here"
        assert peers == [writer.get_extra_info("sockname")]
        writer.close()
        taking.close()
        taking.close()
        await taking.opened()
    return whys


async def test_without_any_descriptor_newcomers_wait_and_are_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    told = await greeted(monkeypatch, [errno.EMFILE] * 3)
    assert told == ["accept failed (Too many open files)"] * 3


async def test_who_has_left_the_queue_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await greeted(monkeypatch, [errno.ECONNABORTED] * 2) == []


@pytest.mark.settings(reuse_port=True)
async def test_whoever_is_in_the_queue_when_the_port_is_left_is_taken(ring, client) -> None:
    # Connected as far as the kernel and the client know: the loop has not turned since.
    with socket.create_connection(("127.0.0.1", ring.gateway.port), timeout=5) as waiting:
        ring.gateway.server.leave_port()
        waiting.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(ring.gateway.server.quiet(), 5)
        assert waiting.recv(100).startswith(b"HTTP/1.1 200 OK")
