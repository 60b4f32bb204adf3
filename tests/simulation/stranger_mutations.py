"""Planted bugs in what is accepted from peers without the supervisor's proof; see `mutations.py`."""

from typing import Any

from mesh.membership.proof import Credentials, HostSecret
from mesh.membership.registration import Registration
from nodes.registry.actor import RegistryActor
from nodes.registry.core import RegistryCore
from tests.simulation.planting import Bug, around, bug, nothing


def _anybody(*_: Any, **__: Any) -> bool:
    return True


def _believe_all(believe: Any, self: RegistryCore, known_members: Any, now: float) -> Any:
    check, self._check = self._check, lambda *_: None
    try:
        return believe(self, known_members, now)
    finally:
        self._check = check


def _of_any_epoch(prove: Any, self: Any, actor_id: Any, _epoch: Any, role: Any) -> Any:
    return prove(self, actor_id, 0, role)


PLANTED: dict[str, Bug] = {
    "a foreign Leave is believed": bug(0, around(Credentials, "believe", _anybody)),
    # The sender's role is the other guard.
    "a foreign PeerDown is believed": bug(
        0,
        around(Credentials, "believe", _anybody),
        around(Registration, "may_say_dead", _anybody),
        around(RegistryActor, "_leave", nothing),
    ),
    "hearsay without a proof is believed": bug(1, around(RegistryCore, "_believe", _believe_all)),
    "whoever says hello is who he says": bug(0, around(Credentials, "vet", lambda *_: False)),
    "a proof is good for every epoch": bug(0, around(HostSecret, "prove", _of_any_epoch)),
}
