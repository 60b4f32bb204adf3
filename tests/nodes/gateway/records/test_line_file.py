"""A file of lines that is bounded, and in which a torn line costs only itself."""

import os
from pathlib import Path

import pytest

from nodes.gateway.records.line_file import LineFile


def test_a_full_file_becomes_the_one_before_it(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "x" / "g.jsonl", 100)
    for number in range(30):
        file.write(b"line %03d\n" % number)
    file.close()
    older, newer = ((tmp_path / "x" / name).read_bytes() for name in ("g.jsonl.1", "g.jsonl"))
    assert max(len(older), len(newer)) <= 100
    assert (older + newer).endswith(b"line 028\nline 029\n")


def test_after_the_half_of_a_line_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.jsonl"
    path.write_bytes(b"of one that was killed")
    file = LineFile(path, 1000)
    file.write(b"first\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    with pytest.raises(OSError, match="only 3 of 7 bytes"):
        file.write(b"second\n")
    monkeypatch.undo()
    file.write(b"third\n")
    file.close()
    assert path.read_bytes().split(b"\n") == [b"of one that was killed", b"first", b"sec", b"third", b""]


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_file_that_somebody_moves_or_removes_is_made_anew(tmp_path: Path, *, is_moved: bool) -> None:
    path = tmp_path / "g.jsonl"
    file = LineFile(path, 20)
    for number in range(4):
        file.write(b"line %03d\n" % number)
        if is_moved:
            path.rename(tmp_path / f"moved.{number}")
        else:
            path.unlink()
    file.write(b"last\n")
    file.close()
    assert path.read_bytes() == b"last\n"
    kept = [(tmp_path / f"moved.{number}").read_bytes() for number in range(4)] if is_moved else []
    assert kept == [b"line %03d\n" % number for number in range(len(kept))]
