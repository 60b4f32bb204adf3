"""A log whose file is moved, removed or replaced by somebody else, as logrotate and cleaners of /tmp do."""

import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh.runtime.log_stream import LogStream


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "a.log"


@pytest.fixture
def stream(log: Path) -> Iterator[LogStream]:
    log.parent.mkdir()
    with log.open("a", buffering=1) as target:
        yield LogStream(target)


def _moved(log: Path) -> None:
    log.rename(log.with_name("a.log.1"))


def _moved_and_made(log: Path) -> None:
    _moved(log)
    log.touch(mode=0o640)


def _made_anew_elsewhere(log: Path) -> None:
    shutil.rmtree(log.parent)
    log.parent.mkdir()


@pytest.mark.parametrize("strike", [_moved, _moved_and_made, Path.unlink, _made_anew_elsewhere])
def test_the_next_line_is_where_people_look(log: Path, stream: LogStream, strike: Callable[[Path], None]) -> None:
    stream.write("first\n")
    for number in range(2):
        strike(log)
        stream.write(f"line {number}\n")
        stream.write("and one\n")
        assert log.read_text() == f"line {number}\nand one\n"
    assert log.stat().st_mode & 0o777 == (0o640 if strike is _moved_and_made else 0o600)


def test_a_file_that_was_cut_goes_on(log: Path, stream: LogStream) -> None:
    stream.write("first\n")
    with log.open("r+b") as file:
        file.truncate(0)
    stream.write("second\n")
    assert log.read_text() == "second\n"


def test_without_a_folder_nothing_stops_and_with_one_it_goes_on(log: Path, stream: LogStream) -> None:
    shutil.rmtree(log.parent)
    assert stream.write("to nobody\n") == len("to nobody\n")
    log.parent.mkdir()
    stream.write("to somebody\n")
    assert log.read_text() == "to somebody\n"


def test_what_was_not_opened_for_appending_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("w", buffering=1) as target:
        stream = LogStream(target)
        path.rename(tmp_path / "moved")
        stream.write("line\n")
    assert [one.name for one in tmp_path.iterdir()] == ["moved"]
    assert LogStream(io.StringIO()).write("line\n") == len("line\n")


def test_output_that_is_no_log_line_follows(log: Path) -> None:
    log.parent.mkdir()
    program = (
        "import os, sys, structlog; from mesh.runtime.telemetry import setup_log; setup_log();"
        "structlog.get_logger().info('first'); os.rename(sys.argv[1], sys.argv[1] + '.1');"
        "structlog.get_logger().info('second'); os.write(1, b'of stdout\\n'); os.system('echo of a child >&2')"
    )
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", program, str(log)], stdout=file, stderr=file, check=True, timeout=60)
    new = log.read_text().splitlines()
    assert '"second"' in new[0]
    assert new[1:] == ["of stdout", "of a child"]
    assert '"first"' in log.with_name("a.log.1").read_text()
