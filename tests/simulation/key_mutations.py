"""One planted bug per promise about keys of hosts; the simulation of keys sees each. How it is done: `planting.py`."""

from typing import Any

from cli.supervisor import allow_list
from cli.supervisor.allow_list import AllowListPush, Telling
from mesh.membership.proof import Credentials
from mesh.transport.guard import Guard
from nodes.registry import actor as registry
from tests.simulation.hosted_mesh import HEAD
from tests.simulation.planting import Bug, around, bug, nothing

_NEWEST = 1 << 40


def _of_any_version(take: Any, self: AllowListPush, sender: Any, message: Any) -> Any:
    if message.allowed.version < self._keys.allowed.version:
        self._keys.write(message.allowed)
    return take(self, sender, message)


def _as_if_taken(answered: Any, self: Telling, address: Any, version: int | None) -> None:
    answered(self, address, _NEWEST if version is None else version)


def _head(*_: Any) -> str:
    return HEAD


def _anybody(*_: Any) -> bool:
    return True


def _none(*_: Any) -> list[str]:
    return []


PLANTED: dict[str, Bug] = {
    "an earlier list replaces a later one": bug(2, around(AllowListPush, "take", _of_any_version)),
    "who did not answer is not told again": bug(12, around(Telling, "answered", _as_if_taken)),
    "what a revoked key sends is taken": bug(7, around(Guard, "vet", nothing)),
    "any supervisor says whose keys are taken": bug(1, around(allow_list, "host_of", _head)),
    "a host of another spec is taken": bug(0, around(registry, "spec_faults", _none)),
    "any host says which incarnations others have": bug(0, around(Credentials, "may_vouch", _anybody)),
}
