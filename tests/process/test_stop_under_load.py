"""The end of a mesh that is busy: every stream ends, nothing is left, and the logs have nothing to complain of."""

import contextlib
import json
import os
import pty
import socket
import sys
import threading

import pytest

pytestmark = pytest.mark.process

SLOW_ECHO = ("--model", "echo?step_ms=20")
NUM_STREAMS = 16
# Streams that do not end by themselves are cut off once the drain has had its time.
EXPECTED = {"request_failed", "drain timed out"}
DRAIN_OVERDUE = {"actor_cut_off"}
"""Of the supervisor, which says who has not drained in time."""


class Streams:
    """Streams that are read until they end, by whatever way."""

    def __init__(self, port):
        self.sockets = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(NUM_STREAMS)]
        self.received = [b""] * NUM_STREAMS
        self.threads = [threading.Thread(target=self.read, args=(number,)) for number in range(NUM_STREAMS)]
        for number, connection in enumerate(self.sockets):
            fields = {"prompt": f"{number} " + "words without end " * 20, "max_tokens": 3000, "ignore_eos": True}
            body = json.dumps({**fields, "stream": True}).encode()
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
        for thread in self.threads:
            thread.start()

    def read(self, number):
        with contextlib.suppress(ConnectionError):
            while data := self.sockets[number].recv(65536):
                self.received[number] += data

    @property
    def all_running(self):
        return all(data.count(b"data: ") > 3 for data in self.received)

    def end(self):
        for thread in self.threads:
            thread.join(30)
        for connection in self.sockets:
            connection.close()
        assert not any(thread.is_alive() for thread in self.threads), "a stream hangs"
        ends = [data.rstrip(b"0\r\n").rpartition(b"\r\n")[2] for data in self.received]
        assert all(end.startswith(b'data: {"error":') and b'"shutting_down"' in end for end in ends), ends


def assert_quiet(host):
    """No actor had anything to complain of but the requests that were cut off."""
    noise = []
    for path in (host.run_directory / "logs").glob("*.log"):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                noise.append((path.name, line))
                continue
            overdue = entry.get("event") in DRAIN_OVERDUE and entry["peer"] == "gateway-0"
            if (
                entry.get("level") in ("warning", "error", "critical")
                and entry["event"] not in EXPECTED
                and not overdue
            ):
                noise.append((path.name, line))
    assert not noise


def up_on_a_terminal(host):
    pid, master = pty.fork()
    if pid == 0:
        os.execve(sys.executable, host.command("up", *SLOW_ECHO, "--port", str(host.port)), host.environment)
    output = b""
    while b"ready at" not in output:
        output += os.read(master, 4096)
    host.wait_ready()
    return pid, master


# A terminal that is closed, without streams: `test_up_and_down.py`.
@pytest.mark.parametrize(
    "keys", [pytest.param(b"\x03", id="interrupted"), pytest.param(b"", id="closed", marks=pytest.mark.slow)]
)
def test_a_terminal_while_streams_run(host, keys):
    host.environment["KVMESH_SUPERVISION__DRAIN_TIMEOUT_S"] = "2"
    pid, master = up_on_a_terminal(host)
    streams = Streams(host.port)
    try:
        host.wait_until(lambda: streams.all_running, "all streams run")
        if keys:
            os.write(master, keys)
        else:
            # The kernel tells the session's processes with SIGHUP, and what they write goes nowhere.
            os.close(master)
        host.wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the supervisor is gone", 30.0)
        if keys:
            os.close(master)
    finally:
        streams.end()
    host.assert_nothing_left()
    assert_quiet(host)
