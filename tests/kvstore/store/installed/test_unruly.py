"""Whatever an installed store does, from seeds; and bugs planted that the seeds must show."""

from collections import Counter
from typing import Any

import pytest

from kvstore.store.checksum import page_checksum
from kvstore.store.installed.calls import BoundedCalls
from kvstore.store.installed.installed_pages import InstalledPages
from kvstore.store.installed.values import PageValues
from tests.kvstore.store.installed.world import run
from tests.simulation.planting import Patches, around, first_caught, returns

NUM_SEEDS = 150


def test_no_page_is_wrong_and_nothing_is_waited_for() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        counts += run(seed).counts
    assert counts["right"] > 10 * NUM_SEEDS, "hardly a page was read"
    assert counts["off"] > 5
    came = {
        "hung",
        "lie",
        "corrupt",
        "stale",
        "failed",
        "scribbled",
        "released",
        "foreign",
        "resealed",
        "short",
        "empty",
    }
    came |= {"raises", "too few", "too many", "nothing", "endless", "cannot be judged", "flipped", "not kept", "lost"}
    assert not came - set(counts)


@pytest.mark.slow
def test_no_page_is_wrong_in_many_seeds() -> None:
    for seed in range(NUM_SEEDS, 2000):
        run(seed)


def _of_data(_: Any, self: PageValues, value: Any) -> int:
    return page_checksum(self._parts(value))


def _of_any_hash(open_value: Any, self: PageValues, page_hash: bytes, value: Any) -> Any:
    return open_value(self, bytes(value[24:40]), value)


def _of_any_identity(open_value: Any, self: PageValues, page_hash: bytes, value: Any) -> Any:
    mine, self._digest = self._digest, bytes(value[8:24])
    try:
        return open_value(self, page_hash, value)
    finally:
        self._digest = mine


def _all_good(commit: Any, self: InstalledPages, write: Any, is_good: Any) -> None:
    commit(self, write, [True] * len(is_good))


def _never_late(abandon: Any, self: BoundedCalls, now: float) -> None:
    abandon(self, now - 1e6)


PLANTED: dict[str, Patches] = {
    "the checksum is not compared": [around(PageValues, "_checksum", returns(7))],
    "the checksum is of the data alone": [around(PageValues, "_checksum", _of_data)],
    "the hash is not compared": [around(PageValues, "open", _of_any_hash)],
    "the identity is not compared": [around(PageValues, "open", _of_any_identity)],
    "generations are not compared": [around(InstalledPages, "commit", _all_good)],
    "nothing is abandoned": [around(BoundedCalls, "_abandon", _never_late)],
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_caught(name: str) -> None:
    assert first_caught(PLANTED[name], run) is not None
