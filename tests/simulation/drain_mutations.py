"""Planted bugs in what becomes of requests whose worker is drained, or that ask an actor what it does not serve."""

from typing import Any
from unittest.mock import patch

from mesh.calls import persistent_ask
from nodes.scheduler.worker_link.worker_drain import WorkerDrain
from tests.simulation.planting import Bug, around, bug, nothing


def _never_back(on_members: Any, self: Any, event: Any, now: Any) -> Any:
    return on_members(self, event._replace(ready={}), now)


def _untold(on_members: Any, self: Any, event: Any, now: Any) -> Any:
    return on_members(self, event._replace(drained={}), now)


PLANTED: dict[str, Bug] = {
    "a drained worker is waited for like one that died": bug(0, around(WorkerDrain, "on_members", nothing)),
    "what a drained worker was computing is kept": bug(0, around(WorkerDrain, "on_due", nothing)),
    "who stays away is waited for like one that is renewed": bug(2, around(WorkerDrain, "on_members", _untold)),
    "a worker that was renewed is taken for drained": bug(8, around(WorkerDrain, "on_members", _never_back)),
    "who does not serve a question has the last word": bug(
        0,
        lambda: patch.object(persistent_ask, "NOT_SERVED", "nothing like it"),
    ),
}
