"""A whole mesh on a device for the length of a benchmark, and requests to it by token ids."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

READY_S = 400.0
_STOP_S = 40.0


@contextlib.contextmanager
def served(model: str, device: str, *options: str) -> Iterator[int]:
    """The port of a mesh that is ready; it is gone afterwards."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = ["up", "--name", f"bench-{os.getpid()}", "--port", str(port), "--model", model, "--device", device]
    command = [sys.executable, "-m", "cli", *words, *options]
    mesh = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    try:
        _wait_ready(mesh, port)
        yield port
    finally:
        mesh.send_signal(signal.SIGTERM)
        try:
            mesh.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(mesh.pid, signal.SIGKILL)
            mesh.wait()


def ask(port: int, model: str, prompt: list[int], num_output: int, **fields: Any) -> Any:
    """The open response to one request for exactly `num_output` tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=600)


def _wait_ready(mesh: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if mesh.poll() is not None:
            sys.exit(f"the mesh ended with {mesh.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    sys.exit(f"the mesh was not ready within {READY_S:.0f} s")
