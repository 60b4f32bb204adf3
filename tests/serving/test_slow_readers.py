"""Clients that do not read what they asked for: nobody else waits for them, and they cost bounded memory."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.held import assert_nothing_held

pytestmark = pytest.mark.process

MESH = ("--model", "echo", "--context-length", "8192")
NUM_SLOW = 32
NUM_NORMAL = 8
REQUESTS_OF_EACH = 5
# Less than the 2,000 events of 250 bytes of each stream would take twice, were they kept.
MAX_GROWTH_BYTES = 24 << 20


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def slow_stream(port: int, number: int) -> socket.socket:
    """A stream that more is written to than the connection's buffers hold, and that nobody reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    fields = {"prompt": f"{number:02d} " + "who reads this " * 100, "max_tokens": 2000, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True}).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def test_normal_clients_go_on_beside_slow_ones(mesh_of: Any) -> None:
    mesh = mesh_of(*MESH)
    pids = mesh.pids()
    mesh.post("/v1/completions", {"prompt": "warm"})
    before = {pid: resident_bytes(pid) for pid in pids}

    def normal(number: int) -> None:
        for turn in range(REQUESTS_OF_EACH):
            text = f"client {number} turn {turn}"
            status, answer = mesh.post("/v1/completions", {"prompt": text, "max_tokens": 100})
            assert (status, answer["choices"][0]["text"]) == (200, text)

    slow = [slow_stream(mesh.port, number) for number in range(NUM_SLOW)]
    try:
        # The head of each answer says that it runs; a byte at a time of some is as slow.
        for connection in slow:
            assert connection.recv(1) == b"H"
        with ThreadPoolExecutor(NUM_NORMAL) as pool:
            list(pool.map(normal, range(NUM_NORMAL)))
            for connection in slow[:8]:
                assert connection.recv(1) == b"T"
            list(pool.map(normal, range(NUM_NORMAL)))
        grown = {pid: resident_bytes(pid) - size for pid, size in before.items()}
        assert max(grown.values()) < MAX_GROWTH_BYTES, grown
    finally:
        for connection in slow:
            connection.close()
    assert_nothing_held(mesh)
    assert "Traceback" not in mesh.logs()
    normal(0)
