"""How the files of the suite take turns: none is lost or cut in two, and those that wait are not left for the end."""

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import TESTS, in_turns


def files(folder: str, num: int) -> list[Any]:
    """Two tests of each file of a folder."""
    return [SimpleNamespace(path=TESTS / folder / f"test_{at}.py") for at in range(num) for _ in range(2)]


@pytest.mark.parametrize("num_waiting", [0, 1, 7, 40, 90])
@pytest.mark.parametrize("num_computing", [0, 1, 9, 60])
def test_every_file_has_its_turn(num_waiting: int, num_computing: int) -> None:
    items = files("nodes", num_computing) + files("process", num_waiting) + files("serving", 2) + files("simulation", 3)
    found = in_turns(items)
    assert sorted(map(id, found)) == sorted(map(id, items))
    order = [path for path, _ in groupby(found, lambda item: item.path)]
    assert len(order) == len(set(order)), "a file's tests stay together"
    folders = [path.parent.name for path in order]
    assert folders[:5] == ["simulation"] * 3 + ["serving"] * 2


def test_those_that_wait_are_spread_and_done_before_the_end() -> None:
    found = in_turns(files("nodes", 100) + files("process", 30))
    folders = [path.parent.name for path, _ in groupby(found, lambda item: item.path)]
    assert max(len(list(group)) for folder, group in groupby(folders) if folder == "process") == 1
    assert folders[-10:] == ["nodes"] * 10
