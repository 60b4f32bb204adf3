"""Every planted bug is seen by the simulation; the seed that is known to show it is run first, then those after it."""

import pytest

from tests.simulation.batch_mutations import GATHERED_LONGER, OPENED_LATE
from tests.simulation.mutations import FIRST_LOST, PLANTED
from tests.simulation.planting import MOST_SEEDS, first_caught
from tests.simulation.scenario import run_seed

KNOWN_SEEDS = {
    "unacknowledged steps are not sent again": 5,
    "any result is taken for the oldest step": 13,
    "only the last result is kept": 13,
    "pages are given back under a step that writes them": 32,
    "pages are committed before the step is acknowledged": 102,
    "locked pages are evicted": 1,
    "a grant is closed while a copy writes": 9,
    "a grant that closes itself leaves no tombstone": 40,
    "a grant that has closed itself answers its sender alone": 40,
    "what an answer does not name is taken for done": 0,
    "one attempt that is refused fails those beside it": 15,
    "what nobody claims is held for good": 0,
    "recovered sequences are claimed for other tokens": 22,
    "deltas are taken wherever they belong": 5,
    "a detokenizer takes tokens behind a gap": 13,
    "a cancel is asked once": 24,
    "attempts of a lost gateway go on": 19,
    "prefilled pages are kept for good": 2,
    "a stream begins behind the position asked for": 33,
    "requests that never fit are taken": 15,
    "a stand-in has the last word on what fits": 179,
    "leases at the registry never end": 7,
    "a new incarnation is taken for the old one": 172,
    "pages of a failed transfer are free at once": 9,
    "a dead scheduler's grants stay open": 59,
    "a pool is mapped while copies write": 153,
    "a worker runs steps of every scheduler epoch": 23,
    "a worker is adopted while a step runs": 283,
    "the pool is taken over before the worker": 283,
    "generations are not compared": 77,
    "pages are counted that are not the first ones": 4,
    "a step is over when its first rank is done": 22,
    "ranks go on without one that died": 14,
    "a rank drops steps that another may have begun": 14,
    "the pool of one rank is made again alone": 145,
    "a device that fails poisons what it is given": 27,
    "a batch that raises fails all its rows": 27,
    "a step that hangs is waited for": 36,
    "output of older attempts is not answered": 24,
    "min_tokens are counted from the attempt": 54,
    "what a sampler looks back at is another's": 0,
    "sequences are not opened again after an adoption": 26,
    "a step that does not match is run": 7,
    "pages are appended, not placed": 13,
}
NUM_NEARBY = 30
"""A change of the world moves what a seed shows; one of the next shows it too, most often."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    assert first_caught(PLANTED[name], run_seed, KNOWN_SEEDS[name], NUM_NEARBY) is not None, (
        f"nobody noticed that {name}"
    )


@pytest.mark.parametrize(
    "harmless", [OPENED_LATE, GATHERED_LONGER, FIRST_LOST], ids=["opened late", "gathered longer", "first lost"]
)
def test_what_goes_with_a_planted_bug_is_none_by_itself(harmless) -> None:
    assert first_caught([harmless], run_seed, 0, 10) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen_from_the_first_seed_on(name: str) -> None:
    caught = first_caught(PLANTED[name], run_seed)
    assert caught is not None, f"nobody noticed within {MOST_SEEDS} seeds that {name}"
    print(f"{name}: seed {caught[0]}, {caught[1]}")
