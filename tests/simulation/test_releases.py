"""Seeds of groups that give their memory back under load, while actors die: no request lost, every text right."""

from collections import Counter

import pytest

from tests.simulation.planting import first_caught
from tests.simulation.release_mutations import PLANTED
from tests.simulation.releases import run_seed

NUM_SEEDS = 30
NUM_SEEDS_OF_ALL = 1500
KNOWN_SEEDS = {
    "the next agent does not know the wish": 17,
    "a worker releases its memory under a step": 27,
    "copies go on from pools that are wanted back": 38,
}
SEEN = {"died: worker", "died: scheduler", "died: kv", "died: registry", "dropped", "duplicated", "sleeps"}


def run_seeds(first: int, count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        counts += run_seed(seed)
    return counts


@pytest.mark.timeout(600)
def test_releases_lose_nothing_whoever_dies() -> None:
    counts = run_seeds(0, NUM_SEEDS)
    print(f"{NUM_SEEDS} seeds: {dict(counts)}")
    assert set(counts) >= SEEN, "the world was too kind to show anything"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_releases_lose_nothing_whoever_dies_for_longer() -> None:
    run_seeds(NUM_SEEDS, NUM_SEEDS_OF_ALL - NUM_SEEDS)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    caught = first_caught(PLANTED[name], run_seed, KNOWN_SEEDS.get(name, 0), NUM_SEEDS)
    assert caught is not None, f"nobody noticed that {name}"
