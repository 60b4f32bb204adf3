"""The file with the key of values: what is read from it, and what is refused."""

import os
from pathlib import Path

import pytest

from kvstore.errors import StoreKeyUnusable
from kvstore.store.installed.key import MIN_BYTES, read_key


def written(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    file = folder / "pool.key"
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("around", [b"", b"\n", b" \r\n"])
def test_the_line_is_the_key(tmp_path: Path, around: bytes) -> None:
    key = os.urandom(MIN_BYTES).hex().encode()
    assert read_key(written(tmp_path, key + around)) == key


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"k" * 40, 0o640, "-rw-r-----.*chmod 600"),
        (b"k" * 40, 0o602, "nobody else's"),
        (b"k" * 31 + b"\n", 0o600, "31 bytes.*openssl rand"),
        (b"", 0o600, "0 bytes"),
        (b"k" * 5000, 0o600, "32 to 4096"),
    ],
)
def test_what_is_no_key(tmp_path: Path, content: bytes, mode: int, why: str) -> None:
    with pytest.raises(StoreKeyUnusable, match=why):
        read_key(written(tmp_path, content, mode))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("none", "No such file"), ("pipe", "no file"), ("", "no file|directory")):
        with pytest.raises(StoreKeyUnusable, match=why):
            read_key(tmp_path / name)


def test_another_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, mine = written(tmp_path, b"k" * 40), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 4711)
    if mine:
        with pytest.raises(StoreKeyUnusable, match=f"belongs to user {mine}"):
            read_key(file)
    else:
        assert read_key(file) == b"k" * 40, "root's are everybody's to trust"
