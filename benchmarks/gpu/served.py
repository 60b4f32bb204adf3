"""A whole mesh on a device for the length of a benchmark, and requests to it by token ids."""

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.server import mesh

READY_S = float(os.environ.get("GPU_CHECK_READY_S", "400"))
"""A first start compiles kernels; the GPU check has compiled them before, and waits less."""


@contextmanager
def served(model: str, device: str, *options: str) -> Iterator[int]:
    """The port of a mesh that is ready; the mesh is stopped afterwards."""
    with mesh("--model", model, "--device", device, *options, timeout_s=READY_S) as (port, _):
        yield port


def ask(port: int, model: str, prompt: list[int], num_output: int, **fields: Any) -> Any:
    """The open response to one request for exactly `num_output` tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=600)
