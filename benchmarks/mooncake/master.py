"""A real Mooncake Store on free ports of loopback, if its package is installed: its master, and clients' settings."""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from mesh.testing.ports import free_port

_START_S = 20.0


def why_not_here() -> str:
    """Why no Mooncake Store can run; empty if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: pip install 'kvmesh[mooncake]'"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"mooncake cannot be used ({error}): apt install libibverbs1"
    return ""


def binary(name: str) -> str:
    """A program that the package brings."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / name)


class Master:
    """One master; `client_ttl_s` is how long it believes that a host is there of which it hears nothing."""

    def __init__(self, folder: Path, client_ttl_s: int = 10) -> None:
        self.port, self._metrics_port = free_port(), free_port()
        self._folder = folder
        self._client_ttl_s = client_ttl_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = {
            "rpc_port": self.port,
            "rpc_address": "127.0.0.1",
            "metrics_port": self._metrics_port,
            "metrics_host": "127.0.0.1",
            "client_ttl": self._client_ttl_s,
        }
        with (self._folder / "master.log").open("ab") as log:
            arguments = [f"--{name}={value}" for name, value in flags.items()]
            self._process = subprocess.Popen([binary("mooncake_master"), *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert self._process.poll() is None, (self._folder / "master.log").read_text()
            assert time.monotonic() < deadline, "the master does not listen"
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It answers nobody meanwhile, and its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def settings(self, name: str, segment_bytes: int = 64 << 20) -> Path:
        """A file for MOONCAKE_CONFIG_PATH, of a host that gives so much to the pool."""
        file = self._folder / f"{name}.json"
        config = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{self.port}",
            "protocol": "tcp",
            "global_segment_size": segment_bytes,
            "local_buffer_size": 64 << 20,
        }
        file.write_text(json.dumps(config))
        return file

    def key(self) -> Path:
        """The file with the key of all hosts."""
        file = self._folder / "pool.key"
        if not file.exists():
            file.touch(0o600)
            file.write_text(os.urandom(32).hex())
        return file
