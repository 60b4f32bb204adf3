"""A mesh over hosts with keys keeps its promises about them, and planted bugs are seen."""

import pytest

from tests.simulation.key_mutations import KEYS_PLANTED
from tests.simulation.keys import run_seed
from tests.simulation.planting import first_caught

KNOWN_SEEDS = dict(zip(KEYS_PLANTED, (2, 12, 7, 1, 0, 0), strict=True))
NUM_NEARBY = 30


@pytest.mark.parametrize("seed", range(5))
def test_a_seed(seed: int) -> None:
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 125))
def test_many_seeds(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("name", KEYS_PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(KEYS_PLANTED[name], run_seed, KNOWN_SEEDS[name], NUM_NEARBY) is not None, (
        f"nobody noticed that {name}"
    )
