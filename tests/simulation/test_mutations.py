"""Every planted bug is seen by the simulation; the seed that is known to show it is run first, then those after it."""

import pytest

from tests.simulation.mutations import MOST_SEEDS, PLANTED, UNSEEN, first_caught

KNOWN_SEEDS: dict[str, int] = {}
NUM_NEARBY = 30
"""A change of the world moves what a seed shows; one of the next shows it too, most often."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(name, KNOWN_SEEDS[name], NUM_NEARBY) is not None, f"nobody noticed that {name}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen_from_the_first_seed_on(name: str) -> None:
    caught = first_caught(name)
    assert caught is not None, f"nobody noticed within {MOST_SEEDS} seeds that {name}"
    print(f"{name}: seed {caught[0]}, {caught[1]}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xfail(reason="the world does not get there, or another guard covers it")
@pytest.mark.parametrize("name", UNSEEN)
def test_a_planted_bug_is_not_seen_yet(name: str) -> None:
    assert first_caught(name) is not None
