"""Figures of docs/status.md that tests can hold."""

import re
from pathlib import Path

from tests.simulation import drain_mutations, mutations, release_mutations, table_mutations
from tests.simulation import test_returns as returns
from tests.simulation import test_strangers as strangers
from tests.simulation.host_mutations import HOSTS_PLANTED
from tests.simulation.key_mutations import KEYS_PLANTED
from tests.simulation.test_whole_mesh import NUM_SEEDS, NUM_SEEDS_OF_ALL

STATUS = (Path(__file__).parents[2] / "docs" / "status.md").read_text()


def test_bugs_and_seeds_are_as_many_as_are_said() -> None:
    planted = (mutations, table_mutations, drain_mutations, release_mutations, returns, strangers)
    num_planted = len(HOSTS_PLANTED) + len(KEYS_PLANTED) + sum(len(one.PLANTED) for one in planted)
    (said,) = re.findall(r"each of (\d+) planted bugs", STATUS)
    assert int(said) == num_planted
    assert f"{NUM_SEEDS} seeds in CI, {NUM_SEEDS_OF_ALL:,} in `make test-all`" in STATUS
