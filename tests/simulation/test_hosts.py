"""Planted bugs of a mesh over hosts are seen. Seeds without one run in `test_whole_mesh.py`."""

import pytest

from tests.simulation.host_mutations import HOSTS_PLANTED
from tests.simulation.hosts import run_seed
from tests.simulation.planting import first_caught

KNOWN_SEEDS = {
    "a cancelled transfer is over before its bytes are": 4,
    "generations are not compared where pages are sent": 70,
    "a host that is lost for good stays in the mesh": 1,
    "a host that was cut off does not join again": 6,
    "a foreign PeerDown is believed": 3,
    "a foreign Leave is believed": 3,
    "a registry forgets the epochs of who has left": 1,
    "changes that a cut swallowed are not missed": 0,
}
NUM_NEARBY = 50


@pytest.mark.parametrize("name", HOSTS_PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(HOSTS_PLANTED[name], run_seed, KNOWN_SEEDS[name], NUM_NEARBY) is not None, (
        f"nobody noticed that {name}"
    )
