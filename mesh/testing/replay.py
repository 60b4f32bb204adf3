"""Replays a core on the events that were logged when it failed.

    failure = read_failure(Path("scheduler-decode-0.log").read_text().splitlines())
    reader = Reader([nodes.scheduler.events, mesh.runtime.effects, nodes.protocol, nodes.request])
    core = SchedulerCore(...)                    # made as failure.setup says
    replay(core.handle, failure, reader)         # raises what the core raised

If `num_left_out` is 0, these are all the events that the core ever had, and it fails as it did then. If it is more, the
first events refer to things that this core does not know; whatever began within the window is complete.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mesh.runtime.driver import CORE_EVENT, CORE_FAILED
from mesh.runtime.recording import Reader


class Failure(NamedTuple):
    """The failure of one core: what it was made of, and its last events, as data."""

    actor: str
    core: str
    error: str
    setup: dict[str, Any]
    num_left_out: int
    events: list[tuple[float, Any]]


def read_failure(lines: Iterable[str], core: str = "") -> Failure:
    """The last failure in the JSON lines of a log, of the core with this name if given. Raises ValueError."""
    found: Failure | None = None
    for line in lines:
        if CORE_FAILED not in line and CORE_EVENT not in line:
            continue
        said = json.loads(line)
        if core and said.get("core") != core:
            continue
        if said["event"] == CORE_FAILED:
            left_out = said["num_left_out"]
            found = Failure(said.get("actor", ""), said["core"], said["error"], said["setup"], left_out, [])
        elif said["event"] == CORE_EVENT and found is not None and said["core"] == found.core:
            found.events.append((said["at"], said["data"]))
    if found is None:
        raise ValueError("there is no failure of a core in these lines")
    return found


def replay(handle: Callable[[Any, float], Any], failure: Failure, reader: Reader) -> None:
    for at, data in failure.events:
        for _ in handle(reader.read(data), at):
            pass
