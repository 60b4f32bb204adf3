"""kill -9 of real processes in the midst of storing and restoring, on a real file.

The long one has SOAK_KILLS kills from SOAK_SEED: `-m slow -s -k many_kills` prints what it has read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

KILLS = int(os.environ.get("SOAK_KILLS", "1000"))
SEED = int(os.environ.get("SOAK_SEED", "2"))


def killed(directory: Path, kills: int, *bugs: str, seed: int = 1) -> dict[str, int]:
    directory.chmod(0o700)
    command = [sys.executable, "-m", "tests.kvstore.store.killed_writer", str(directory), str(seed), str(kills), *bugs]
    # A second a kill is three times what it takes on a disk that syncs slowly.
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60 + kills)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def require_sound(found: dict[str, int], kills: int) -> None:
    print(f"{kills} kills: {found}")
    # Read by those that opened what was left, and by those that were killed; a third of the kills hit a restore.
    assert found["right"] > 10 * kills
    assert found["restored"] > 10 * kills
    assert found["killed amid a restore"] > kills // 10
    sound = ("right", "restored", "killed amid a restore")
    assert {name: number for name, number in found.items() if number and name not in sound} == {}


def test_no_page_is_wrong_torn_or_lost_after_kills(tmp_path: Path) -> None:
    require_sound(killed(tmp_path, 30), 30)


@pytest.mark.slow
# A disk that takes a third of a second to sync each store that is closed needs six minutes for a thousand.
@pytest.mark.timeout(120 + KILLS)
def test_no_page_is_wrong_torn_or_lost_after_many_kills(tmp_path: Path) -> None:
    require_sound(killed(tmp_path, KILLS, seed=SEED), KILLS)


def test_without_zeroed_heads_pages_are_torn_and_refused(tmp_path: Path) -> None:
    found = killed(tmp_path, 60, "without zeroing")
    assert found["corrupt"] > 0
    assert not found.get("WRONG")


def test_without_checksums_too_they_are_served(tmp_path: Path) -> None:
    assert killed(tmp_path, 60, "without zeroing", "without checksums")["WRONG"] > 0
