"""Whole meshes as a user starts them: `meshctl up` in a child process, on a free port, gone afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.chaos.held import samples
from mesh.testing.ports import free_port
from tests.process.conftest import wait_until

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
MOST_MESHES = 2
"""Meshes that idle take their share of the cores too: a dozen of them a third of one."""
APART = ("--model", "tiny", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0")
MIXED = ("--model", "tiny", "--mixed", "1")
"""The meshes that most files share."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Files of one of these meshes in a row, and of both behind them: five starts less, of four seconds of a core."""
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    here = [items[place] for place in places]
    here.sort(key=lambda item: ("APART" not in vars(item.module), "MIXED" in vars(item.module)))
    for place, item in zip(places, here, strict=True):
        items[place] = item


@dataclass(frozen=True)
class RunningMesh:
    """A mesh that is ready."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    seconds_to_ready: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded JSON, of errors too. A `bytes` body is sent as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def ps(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "cli", "ps", "--name", self.name, "-o", "json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=20).stdout)

    def pids(self) -> list[int]:
        """Those of all actors; waits for actors that are so busy that a first question goes without an answer."""

        def look() -> list[int] | None:
            found = [actor["pid"] for actor in self.ps()]
            return found if None not in found else None

        return wait_until(look, "the pid of every actor is known", 30.0)

    def pages_moved(self, least: int) -> None:
        """Wait until more than `least` pages are counted as moved: a scrape leaves out who does not answer in time."""

        def has_moved() -> bool:
            counts = self.metrics().items()
            return sum(value for name, value in counts if name.startswith("mesh_kv_transfer_pages_total")) > least

        wait_until(has_moved, f"more than {least} pages have moved", 30.0)

    def logs(self) -> str:
        """What all actors wrote."""
        command = [sys.executable, "-m", "cli", "logs", "--name", self.name, "-n", "1000000"]
        return subprocess.run(command, capture_output=True, check=True, timeout=20, text=True).stdout

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by its name with labels."""
        return samples(self.get("/metrics").decode())


@contextmanager
def start_mesh(log: Path, *options: str, port: int = 0) -> Iterator[RunningMesh]:
    port, name = port or free_port(), f"t{os.getpid()}-{time.time_ns() % 10**6}"
    command = [sys.executable, "-m", "cli", "up", "--port", str(port), "--name", name, *options]
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_ready(process, port, log)
        yield RunningMesh(name, port, process, time.perf_counter() - began)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"the mesh did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM:\n{log.read_text()[-4000:]}")


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the mesh ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"not ready within {START_TIMEOUT_S:.0f} s:\n{log.read_text()[-4000:]}")


MeshOf = Callable[..., RunningMesh]


@pytest.fixture(scope="session")
def mesh_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshOf]:
    """`mesh_of(*options)`: a ready mesh with these options, shared by the tests that ask for it in a row."""
    running: dict[tuple[str, ...], tuple[RunningMesh, ExitStack]] = {}

    def get(*options: str) -> RunningMesh:
        if options in running:
            running[options] = running.pop(options)
        else:
            while len(running) >= MOST_MESHES:
                running.pop(next(iter(running)))[1].close()
            stack = ExitStack()
            log = tmp_path_factory.mktemp("mesh") / "up.log"
            running[options] = stack.enter_context(start_mesh(log, *options)), stack
        return running[options][0]

    with ExitStack() as all_of_them:
        yield get
        for _, stack in running.values():
            all_of_them.push(stack)


@pytest.fixture
def mesh(mesh_of: MeshOf) -> RunningMesh:
    """The echo model, whose context is short; it makes vectors, too."""
    return mesh_of("--model", "echo", "--context-length", "1024", "--pooling", "mean")
