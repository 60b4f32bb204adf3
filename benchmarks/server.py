"""Starts a whole mesh for a benchmark on a free port, asks it, and stops it again."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli.bench.client import MakeBody, Server
from cli.bench.loops import closed_loop
from cli.bench.summary import Summary, summarize
from mesh.testing.ports import free_port

START_TIMEOUT_S = 180.0


def get(url: str, timeout_s: float = 10.0) -> bytes:
    """The body of a GET; raises URLError."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return response.read()


@contextmanager
def mesh(
    *options: str, tree: Path | None = None, timeout_s: float = START_TIMEOUT_S, look_s: float = 0.1
) -> Generator[tuple[int, str]]:
    """A mesh of its own in the foreground of a child process: `(port, name)` once `/health/ready` says 200.

    `tree` is another checkout to run it from, with the packages installed here. The mesh has `timeout_s` to get ready,
    which is looked for every `look_s`.
    """
    port, name = free_port(), f"bench-{os.getpid()}-{time.time_ns() % 100_000}"
    command = [sys.executable, "-m", "cli", "up", "--port", str(port), "--name", name, *options]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, cwd=tree, env=_environment(tree)
        )
        try:
            _wait_ready(process, port, Path(log.name), timeout_s, look_s)
            yield port, name
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def _environment(tree: Path | None) -> dict[str, str]:
    return dict(os.environ) if tree is None else os.environ | {"PYTHONPATH": str(tree)}


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float, look_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the mesh did not start (exit {process.returncode}):\n{log.read_text()}")
        try:
            get(f"http://127.0.0.1:{port}/health/ready", 1.0)
        except (urllib.error.URLError, OSError):
            time.sleep(look_s)
        else:
            return
    raise RuntimeError(f"the mesh was not ready in {timeout_s:.0f} s:\n{log.read_text()}")


async def ask(port: int, concurrency: int, num_requests: int, make_body: MakeBody) -> Summary:
    """`num_requests` from so many clients, as `meshctl bench` sends them. Raises RuntimeError if one of them fails."""
    summary = summarize(await closed_loop(Server("127.0.0.1", port), concurrency, num_requests, make_body))
    if summary.failures:
        # What the others waited for says little then.
        raise RuntimeError(f"{summary.failures} of {num_requests} requests: {summary.examples}")
    return summary


def actors(name: str, tree: Path | None = None) -> list[dict[str, Any]]:
    """What `meshctl ps -o json` lists, run from `tree`: a mesh may speak its own checkout's protocol version only."""
    command = [sys.executable, "-m", "cli", "ps", "--name", name, "-o", "json"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=tree, env=_environment(tree))
    return json.loads(done.stdout)


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
