"""Figures of docs/status.md that tests can hold."""

import re
from pathlib import Path

from tests.simulation.suites import SUITES
from tests.simulation.test_whole_mesh import NUM_SEEDS, NUM_SEEDS_OF_ALL

STATUS = (Path(__file__).parents[2] / "docs" / "status.md").read_text()


def test_bugs_and_seeds_are_as_many_as_are_said() -> None:
    num_planted = sum(len(suite.planted) for suite in SUITES.values())
    (said,) = re.findall(r"each of (\d+) planted bugs", STATUS)
    assert int(said) == num_planted
    assert f"{NUM_SEEDS} seeds in CI, {NUM_SEEDS_OF_ALL:,} in `make test-all`" in STATUS
