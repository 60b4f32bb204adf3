"""Nobody waits for what an operator has taken away, and whoever can be served elsewhere is."""

from collections import Counter

import pytest

from tests.simulation.drain_mutations import PLANTED
from tests.simulation.drains import run_seed
from tests.simulation.planting import first_caught

NUM_SEEDS = 16
NUM_NEARBY = 24


def test_requests_of_a_drained_worker_go_elsewhere_or_end_in_time() -> None:
    counts: Counter[str] = sum((run_seed(seed) for seed in range(NUM_SEEDS)), Counter())
    assert min(counts["drained"], counts["told"], counts["renewed"]) > 2


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(PLANTED[name], run_seed, 0, NUM_NEARBY) is not None, f"nobody noticed that {name}"
