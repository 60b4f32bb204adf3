"""Without a planted bug nothing is seen, and each planted bug is, whatever else happens to the mesh."""

from collections import Counter

import pytest

from nodes.gateway.requests.log import RequestState
from tests.simulation.mutations import FIRST_LOST, GATHERED_LONGER, OPENED_LATE, SCENARIO
from tests.simulation.planting import MOST_SEEDS, Where, around, first_caught
from tests.simulation.scenario import run_seed
from tests.simulation.suites import SUITES

PLANTED = [pytest.param(name, bug, id=f"{name}: {bug}") for name, suite in SUITES.items() for bug in suite.planted]
LATE = [
    pytest.param(name, bug, id=bug)
    for name, suite in SUITES.items()
    for bug, (seed, _) in suite.planted.items()
    if seed
]
HARMLESS = {
    "what an answer does not name is taken for done": OPENED_LATE,
    "one attempt that is refused fails those beside it": GATHERED_LONGER,
    "pages are counted that are not the first ones": FIRST_LOST,
}
"""What goes with a planted bug, by its name."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if suite.num_seeds])
def test_seeds_of_a_suite(name: str) -> None:
    suite = SUITES[name]
    counts: Counter[str] = sum(map(suite.run_seed, range(suite.num_seeds)), Counter())
    rare = {what: counts[what] for what, least in suite.least.items() if counts[what] < least}
    assert not rare, "the world was too kind to show anything"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if suite.num_slow])
def test_more_seeds_of_a_suite(name: str) -> None:
    suite = SUITES[name]
    for seed in range(suite.num_seeds, suite.num_slow):
        suite.run_seed(seed)


@pytest.mark.parametrize(("name", "bug"), PLANTED)
def test_a_planted_bug_is_seen(name: str, bug: str) -> None:
    suite = SUITES[name]
    seed, patches = suite.planted[bug]
    assert first_caught(patches, suite.run_seed, seed, suite.num_nearby) is not None, f"nobody noticed that {bug}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "bug"), LATE)
def test_a_planted_bug_is_seen_from_the_first_seed_on(name: str, bug: str) -> None:
    caught = first_caught(SUITES[name].planted[bug].patches, SUITES[name].run_seed)
    assert caught is not None, f"nobody noticed within {MOST_SEEDS} seeds that {bug}"
    print(f"{bug}: seed {caught[0]}, {caught[1]}")


def test_what_does_not_fit_the_code_is_no_bug_that_was_seen() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        first_caught([around(RequestState, "accept", lambda accept, self: None)], run_seed, most=1)


@pytest.mark.parametrize(("bug", "harmless"), HARMLESS.items(), ids=HARMLESS)
def test_what_goes_with_a_planted_bug_is_none_by_itself(bug: str, harmless: Where) -> None:
    """Nor in the seeds that show the bug."""
    assert first_caught([around(*harmless)], run_seed, SCENARIO[bug].seed, most=3) is None
