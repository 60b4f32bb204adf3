"""Planted bugs in the epochs and grant ids of actors that return without their files; see `mutations.py`."""

import os
from typing import Any

from mesh.supervision.core import Supervisor
from nodes.registry.core import RegistryCore
from tests.simulation.host_mutations import members_alone
from tests.simulation.planting import Bug, around, bug


def _not_told(spawn: Any, self: Supervisor, watch: Any) -> None:
    watch.known_epoch = 0
    spawn(self, watch)


def _from_one(spawn: Any, self: Supervisor, watch: Any) -> None:
    watch.epoch = 0
    spawn(self, watch)


FROM_A_LOST_FILE = around(Supervisor, "_spawn", _from_one)
PLANTED: dict[str, Bug] = {
    "the epoch that a refusal names is not heard": bug(1, around(Supervisor, "_spawn", _not_told)),
    "a registry forgets the epochs of who has left": bug(16, around(RegistryCore, "_newest", members_alone)),
    "grants are named by epoch and count alone": bug(0, around(os, "urandom", lambda _, count: bytes(count))),
    "epochs are counted from a lost file": bug(0, FROM_A_LOST_FILE, around(RegistryCore, "_newest", members_alone)),
}
