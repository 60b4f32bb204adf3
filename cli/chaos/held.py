"""What a mesh still holds for requests, by its own metrics. Pure."""

import re
from typing import Final

# Every gauge of something that is there for a request. Pages may stay cached, a detokenizer keeps ended streams awhile.
HELD: Final = re.compile(
    r"mesh_(gateway_\w+_(running|waiting|inflight)|kv_grants_open|kv_pages_in_transfer\{"
    r"|kv_sessions.*state=\"(bootstrapping|transferring|waiting)\""
    r"|scheduler_num_(running|waiting|handoffs|orders|leaving|grants_closing|finished_kept)"
    r"|scheduler_pages.*state=\"(running|granted|in_flight|quarantined)\")"
)


def samples(text: str) -> dict[str, float]:
    """Every sample of a page of `/metrics`, by its name with labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def held(metrics: dict[str, float]) -> dict[str, float]:
    """The samples that say that something is still held."""
    return {name: value for name, value in metrics.items() if value and HELD.match(name)}
