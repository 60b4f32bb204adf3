"""Five hundred seeds of message faults: every request ends exactly once with the right text, and nothing is held."""

from collections import Counter

import pytest

from tests.simulation.scenario import run_seed

NUM_SEEDS = 500
BATCH = 25


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_every_request_ends_once_with_its_text(first: int) -> None:
    faults: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        faults += run_seed(seed)
    assert {"dropped", "duplicated", "slowed"} <= set(faults), "the network was too kind to show anything"


def test_a_seed_repeats_itself() -> None:
    assert run_seed(3) == run_seed(3)
