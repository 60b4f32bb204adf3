"""Meshes as processes, each test in a run directory of its own, and proof that nothing outlives them."""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from mesh.testing.ports import free_port
from tests.process.commands import CommandServer

TIMEOUT_S = 60.0
_PYTHON_M_CLI = 3


@functools.cache
def command_server():
    """One for all tests of this process; it ends with it."""
    server = CommandServer()
    atexit.register(server.close)
    return server


def wait_until(condition, what, timeout_s=TIMEOUT_S):
    """Look again until it is true; what another process does can only be polled."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return result


class Host:
    """One run directory with the meshes in it."""

    wait_until = staticmethod(wait_until)

    def __init__(self, base):
        self.base = Path(base)
        self.name = f"t{os.getpid()}-{self.base.name[-8:].lower().replace('_', '0')}"
        self.port = free_port()
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(base), "XDG_CONFIG_HOME": str(base)}
        self.started = []

    @property
    def run_directory(self):
        return self.base / f"kvmesh-{os.getuid()}" / self.name

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def command(self, *arguments, name=True):
        return [sys.executable, "-m", "cli", *arguments, *(["--name", self.name] if name else [])]

    def meshctl(self, *arguments, name=True, timeout_s=TIMEOUT_S, **environment):
        """Run one command to its end."""
        command, environment = self.command(*arguments, name=name), {**self.environment, **environment}
        if arguments[0] != "up":
            return command_server().run(command[_PYTHON_M_CLI:], environment, timeout_s)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)

    def up(self, *arguments, wait=True, **environment):
        """Start in the foreground of a session of its own."""
        log = self.base / f"up-{len(self.started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command("up", "--port", str(self.port), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**self.environment, **environment},
            )
        process.log = log
        self.started.append(process)
        if wait:
            self.wait_ready(process)
        return process

    def wait_ready(self, process=None, timeout_s=TIMEOUT_S):
        def ready():
            if process is not None and process.poll() is not None:
                pytest.fail(f"up ended with {process.returncode}:\n{process.log.read_text()}")
            try:
                with urllib.request.urlopen(self.url + "/health/ready", timeout=1):
                    return True
            except OSError:
                return False

        wait_until(ready, "the mesh is ready", timeout_s)

    def metrics(self):
        """The text of a scrape."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            return response.read().decode()

    def ps(self):
        """Entries of `ps -o json` by actor id."""
        listed = self.meshctl("ps", "-o", "json")
        assert listed.returncode == 0, listed.stderr
        return {entry["actor_id"]: entry for entry in json.loads(listed.stdout)}

    def pids(self):
        """By actor id, of everybody: a mesh serves before the last of its groups has been started."""

        def found():
            pids = {actor_id: entry["pid"] for actor_id, entry in self.ps().items()}
            return pids if all(pids.values()) else None

        return wait_until(found, "every actor has been started")

    def say(self, text, timeout_s=30, **parameters):
        """What the mesh answers to one chat message."""
        body = {"model": "echo", "messages": [{"role": "user", "content": text}], **parameters}
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read())["choices"][0]["message"]["content"]

    def processes(self):
        """Every process whose environment names this run directory."""
        mark = f"XDG_RUNTIME_DIR={self.base}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes() + b"\0":
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def segments(self):
        return [path.name for path in Path("/dev/shm").glob(f"*{self.name}.*")]

    def sockets(self):
        # An engine's directory goes while it is looked at.
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self.run_directory / "s")
        return []

    def assert_nothing_left(self, within_s=15.0):
        def left():
            return [f"process {pid}" for pid in self.processes()] + self.segments() + self.sockets()

        try:
            wait_until(lambda: not left(), "everything is gone", within_s)
        except AssertionError as error:
            raise AssertionError(f"left behind: {left()}") from error
        assert not (self.run_directory / "manifest.json").exists()

    def ends_well(self, mesh):
        """Told to end, the mesh does so, and nothing is left of it."""
        mesh.terminate()
        assert mesh.wait(30) == 0, mesh.log.read_text()
        self.assert_nothing_left()

    def clean(self):
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it may end by itself between the listing and this
                os.kill(pid, signal.SIGKILL)
        # Of all hosts of a mesh of this name, whose segments have the host's name behind it: they end here as well.
        for path in Path("/dev/shm").glob(f"*{self.name}[._]*"):
            path.unlink(missing_ok=True)


@pytest.fixture
def host(another_host):
    return another_host()


@pytest.fixture
def another_host():
    """Makes hosts of one mesh, each with a run directory of its own."""
    with contextlib.ExitStack() as stack:
        first = []

        def make():
            # Under /tmp and short: paths of sockets are at most a hundred bytes.
            base = tempfile.mkdtemp(prefix="km")
            stack.callback(shutil.rmtree, base)
            host = Host(base)
            stack.callback(host.clean)
            first.append(host)
            host.name = first[0].name
            return host

        yield make
