"""What counts as a line of logic."""

import subprocess

import pytest

from tools import lines

SOURCE = '''"""A module
of two lines."""

import os
from a import (
    b,
    c,
)

LIMIT = 3  # a reason


@override
def run(one: int) -> str:
    """Says."""
    # why
    text = """kept
as it is"""

    return text
'''


def test_blanks_docstrings_comments_imports_and_overriding_are_no_logic() -> None:
    assert lines.count_logic(SOURCE) == 5


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True, capture_output=True
        )

    monkeypatch.chdir(tmp_path)
    git("init")
    for name, text in (("mesh/one/a.py", SOURCE), ("tests/b.py", "x = 'ä'\n"), ("elsewhere/c.py", "y = 1\n")):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    git("add", ".")
    git("commit", "-m", "one")
    return tmp_path


def test_a_revision_is_counted_beside_what_lies_there_now(checkout, capsys, monkeypatch) -> None:
    (checkout / "mesh/one/a.py").write_text("x = 1\n")
    monkeypatch.setattr("sys.argv", ["lines", "--depth", "2", "HEAD", "worktree"])
    lines.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| mesh/one | 5 | 1 | -80 % |",
        "| tests | 1 | 1 | +0 % |",
        "| without tests | 5 | 1 | -80 % |",
        "| total | 6 | 2 | -67 % |",
    ]
