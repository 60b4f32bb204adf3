"""kill -9 of real processes in the midst of writing, on a real file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def killed(directory: Path, kills: int, *bugs: str, seed: int = 1) -> dict[str, int]:
    directory.chmod(0o700)
    command = [sys.executable, "-m", "tests.kvstore.store.killed_writer", str(directory), str(seed), str(kills), *bugs]
    # A second a kill is ten times what it takes.
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60 + kills)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def require_sound(found: dict[str, int], kills: int) -> None:
    assert found["right"] > 10 * kills
    assert {name: number for name, number in found.items() if number and name != "right"} == {}


def test_no_page_is_wrong_torn_or_lost_after_kills(tmp_path: Path) -> None:
    require_sound(killed(tmp_path, 30), 30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_page_is_wrong_torn_or_lost_after_a_thousand_kills(tmp_path: Path) -> None:
    require_sound(killed(tmp_path, 1000, seed=2), 1000)


def test_without_zeroed_heads_pages_are_torn_and_refused(tmp_path: Path) -> None:
    found = killed(tmp_path, 60, "without zeroing")
    assert found["corrupt"] > 0
    assert not found.get("WRONG")


def test_without_checksums_too_they_are_served(tmp_path: Path) -> None:
    assert killed(tmp_path, 60, "without zeroing", "without checksums")["WRONG"] > 0
