"""Who is not the supervisor's ends nobody, is sent nothing, and costs no request its text."""

from collections import Counter
from typing import Any

import pytest

from mesh.membership.proof import Credentials, HostSecret
from mesh.membership.registration import Registration
from nodes.registry.actor import RegistryActor
from nodes.registry.core import RegistryCore
from tests.simulation.planting import Patches, around, first_caught, nothing
from tests.simulation.strangers import ATTACKS, run_seed

NUM_SEEDS = 4
NUM_NEARBY = 10


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


PLANTED: dict[str, Patches] = {
    "a foreign Leave is believed": [around(Credentials, "believe", _anybody)],
    # The sender's role is the other guard.
    "a foreign PeerDown is believed": [
        around(Credentials, "believe", _anybody),
        around(Registration, "may_say_dead", _anybody),
        around(RegistryActor, "_leave", nothing),
    ],
    "hearsay without a proof is believed": [around(RegistryCore, "_believe", _believe_all)],
    "whoever says hello is who he says": [around(Credentials, "vet", lambda *_: False)],
    "anybody may end an actor": [around(Credentials, "obey", _anybody)],
    "a proof is good for every epoch": [around(HostSecret, "prove", _of_any_epoch)],
}


def test_strangers_are_refused_and_nobody_notices() -> None:
    counts: Counter[str] = sum((run_seed(seed) for seed in range(NUM_SEEDS)), Counter())
    assert all(counts[attack.__name__] for attack in ATTACKS)
    # Of hearsay without a proof nothing is said: whoever was started by hand has no other.
    assert counts["refused"] > 9 * NUM_SEEDS


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(PLANTED[name], run_seed, 0, NUM_NEARBY) is not None, f"nobody noticed that {name}"
