"""Whether a mesh still holds anything for requests, by its own metrics."""

import time
from typing import Any

from cli.chaos.held import HELD, held


def assert_nothing_held(mesh: Any, within_s: float = 20.0) -> None:
    assert sum(HELD.match(name) is not None for name in mesh.metrics()) >= 20, "the metrics have other names now"
    deadline = time.monotonic() + within_s
    while (left := held(mesh.metrics())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left
