"""What a mesh still holds for requests, by its own metrics."""

import re
import time
from typing import Any

# Every gauge of something that is there for a request. Pages may stay cached, a detokenizer keeps ended streams awhile.
HELD = re.compile(
    r"mesh_(gateway_\w+_(running|waiting|inflight)|kv_grants_open|kv_transfer_pages\{"
    r"|kv_sessions.*state=\"(bootstrapping|transferring|waiting)\""
    r"|scheduler_num_(running|waiting|handoffs|orders|leaving|grants_closing|finished_kept)"
    r"|scheduler_pages.*state=\"(running|granted|in_flight|quarantined)\")"
)


def held(metrics: dict[str, float]) -> dict[str, float]:
    """The samples that say that something is still held."""
    return {name: value for name, value in metrics.items() if value and HELD.match(name)}


def assert_nothing_held(mesh: Any, within_s: float = 20.0) -> None:
    assert sum(HELD.match(name) is not None for name in mesh.metrics()) >= 20, "the metrics have other names now"
    deadline = time.monotonic() + within_s
    while (left := held(mesh.metrics())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left
