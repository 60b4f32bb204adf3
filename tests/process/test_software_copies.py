"""Pages between processes on a device of software: the calls that a real one gets, by each way there is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.software_device.device import bytes_in_use, environment

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["kernel", "calls", "tcp", "nccl"])
def test_pages_arrive_and_all_memory_is_given_back(way: str, tmp_path: Path) -> None:
    variables = os.environ | environment(tmp_path / "device")
    variables["PYTHONPATH"] = os.pathsep.join((variables["PYTHONPATH"], str(ROOT)))
    (tmp_path / "pools").mkdir()
    words = [sys.executable, str(Path(__file__).parent / "copying.py"), way, str(tmp_path / "pools")]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "arrived\n"), done.stderr
    assert bytes_in_use(tmp_path / "device") == 0
