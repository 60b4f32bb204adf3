"""Epochs and grants are never used twice, whatever a container loses with its files and its clock."""

import os
from collections import Counter
from typing import Any

import pytest

from mesh.supervision.core import Supervisor
from nodes.registry.core import RegistryCore
from tests.simulation.planting import Patches, around, first_caught
from tests.simulation.returns import run_seed

NUM_SEEDS = 12
NUM_NEARBY = 20


def _not_told(spawn: Any, self: Supervisor, watch: Any) -> None:
    watch.known_epoch = 0
    spawn(self, watch)


def _members_alone(_newest: Any, self: Any, actor_id: Any) -> Any:
    return self._members[actor_id].epoch if actor_id in self._members else 0


def _from_one(spawn: Any, self: Supervisor, watch: Any) -> None:
    watch.epoch = 0
    spawn(self, watch)


FROM_A_LOST_FILE = around(Supervisor, "_spawn", _from_one)
PLANTED: dict[str, Patches] = {
    "the epoch that a refusal names is not heard": [around(Supervisor, "_spawn", _not_told)],
    "a registry forgets the epochs of who has left": [around(RegistryCore, "_newest", _members_alone)],
    "grants are named by epoch and count alone": [around(os, "urandom", lambda _, count: bytes(count))],
    "epochs are counted from a lost file": [FROM_A_LOST_FILE, around(RegistryCore, "_newest", _members_alone)],
}


def test_who_returns_without_files_is_served_and_serves() -> None:
    counts: Counter[str] = sum((run_seed(seed) for seed in range(NUM_SEEDS)), Counter())
    assert min(counts["remade"], counts["behind"], counts["refused"]) > 2


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(PLANTED[name], run_seed, 0, NUM_NEARBY) is not None, f"nobody noticed that {name}"
