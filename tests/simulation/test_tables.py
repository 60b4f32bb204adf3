"""Whoever had a slot of the worker's table before leaves nothing there for whoever has it next."""

from collections import Counter

import pytest

from tests.simulation.planting import first_caught
from tests.simulation.table_mutations import PLANTED
from tests.simulation.tables import run_seed

NUM_SEEDS = 12
KNOWN_SEEDS = {
    "a worker's table is kept over epochs": 9,
    "a slot is used while it is in flight": 1,
    "a late draw is recorded": 7,
}
NUM_NEARBY = 40


def test_sequences_that_take_each_others_places_keep_their_text() -> None:
    counts: Counter[str] = sum((run_seed(seed) for seed in range(NUM_SEEDS)), Counter())
    assert counts["scheduler"] > NUM_SEEDS / 2


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(PLANTED[name], run_seed, KNOWN_SEEDS[name], NUM_NEARBY) is not None, (
        f"nobody noticed that {name}"
    )
