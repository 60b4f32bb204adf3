"""Files of this user: which are read, how they are replaced on a full disk, and when one is seen to have changed."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh.runtime.own_files import NotPlain, NotPrivate, WatchedFile, read_file, replace_file, require_own


def test_only_a_plain_file_of_this_user_is_read(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"content")
    link.symlink_to(file)
    assert (read_file(file), read_file(file, 3), read_file(link, follows=True)) == (b"content", b"con", b"content")
    with pytest.raises(OSError, match="symbolic links"):
        read_file(link)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotPlain, match="pipe is not a regular file"):
        read_file(tmp_path / "pipe")


def test_what_is_secret_is_read_only_if_nobody_else_could(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    for mode in (0o640, 0o604, 0o620, 0o610):
        file.chmod(mode)
        assert read_file(file) == b"content"
        with pytest.raises(NotPrivate, match=f"{file} may be read or changed by other users: chmod go-rwx {file}"):
            read_file(file, is_secret=True)
    file.chmod(0o600)
    assert read_file(file, is_secret=True) == b"content"
    status = SimpleNamespace(st_uid=os.getuid() + 1, st_mode=0o600)
    for is_secret in (True, False):
        with pytest.raises(NotPrivate, match=f"belongs to user {os.getuid() + 1}: make this user its owner"):
            require_own(file, status, is_secret=is_secret)  # type: ignore[arg-type]


def test_a_change_is_seen_once_and_a_file_that_is_not_there_at_each_look(tmp_path):
    file = tmp_path / "file"
    watched = WatchedFile(file)
    assert [watched.has_changed() for _ in range(2)] == [True, True]
    file.write_bytes(b"content")
    assert [watched.has_changed() for _ in range(2)] == [True, False]
    for change in (
        lambda: file.write_bytes(b"longer content"),
        lambda: file.chmod(0o600),
        lambda: replace_file(file, b"another file"),
        watched.forget,
    ):
        change()
        assert [watched.has_changed() for _ in range(2)] == [True, False]


def test_a_full_disk_is_written_over_within_what_a_file_has(tmp_path, monkeypatch):
    file = tmp_path / "file"
    assert replace_file(file, b"before")
    blocks = file.stat().st_blocks * 512

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for content in (b"much longer than it was", b"short"):
        assert not replace_file(file, content)
        assert file.read_bytes() == content
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"x" * (blocks + 1))
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "new", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"short"
