"""Hashes that are kept: used for files that nobody has touched, and whatever is wrong with them, read again."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nodes.model_spec import file_hash, hash_cache, resolve_model
from nodes.model_spec.file_hash import FileHash, FileHasher, state_of
from nodes.model_spec.hash_cache import KEPT_S, SETTLED_S, find_hashes, forget_hashes, keep_hashes
from tests.nodes.checkpoints import LLAMA, write_model

WRONG = bytes(32)


class Cache:
    """A cache of its own, and a file of which it has a wrong hash, so that a test sees whether it was believed."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "kvmesh"
        self.file = self.folder / "weights"
        self.model = write_model(home.parent / "m", LLAMA)
        self.weights = str(self.model / "model.safetensors")
        self.keep(WRONG)

    def keep(self, digest: bytes, age_s: float = KEPT_S) -> None:
        keep_hashes({self.weights: FileHash(state_of(self.weights), digest, age_s)})
        forget_hashes()

    def believes(self) -> bool:
        state = state_of(self.weights)
        return find_hashes({self.weights: state}) == {self.weights: WRONG}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hash_cache, "_read_here", {})
    return Cache(tmp_path / "cache")


def test_a_hash_is_kept_for_the_user_alone(cache: Cache) -> None:
    assert cache.believes()
    assert (cache.folder.stat().st_mode & 0o777, cache.file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_second_start_reads_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.file.unlink()
    # The files are as old as they must be.
    now_ns = time.time_ns
    monkeypatch.setattr(file_hash.time, "time_ns", lambda: now_ns() + int(61e9))
    first = resolve_model(str(cache.model))
    forget_hashes()
    monkeypatch.setattr(FileHasher, "hash", None)
    again = resolve_model(str(cache.model))
    assert again == first
    assert again.weights is not None
    assert again.weights.is_settled


@pytest.mark.parametrize(("age_s", "is_known", "is_kept"), [(0.0, False, False), (SETTLED_S, True, False),
                                                          (KEPT_S - 1, True, False), (KEPT_S, True, True)])  # fmt: skip
def test_what_has_just_changed_is_not_kept(cache: Cache, age_s: float, is_known: bool, is_kept: bool) -> None:
    cache.file.unlink()
    state = state_of(cache.weights)
    keep_hashes({cache.weights: FileHash(state, WRONG, age_s)})
    assert bool(find_hashes({cache.weights: state})) == is_known, "in this process"
    forget_hashes()
    assert cache.believes() == is_kept


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode", "device"])
def test_a_file_in_another_state_is_read_again(cache: Cache, field: str) -> None:
    state = state_of(cache.weights)
    fields = {name: getattr(state, name) + (name == field) for name in state.__struct_fields__}
    assert find_hashes({cache.weights: type(state)(**fields)}) == {}
    assert find_hashes({f"{cache.weights}2": state}) == {}


def test_an_edit_in_place_whose_time_is_set_back_is_seen(cache: Cache) -> None:
    times, before = os.stat(cache.weights), state_of(cache.weights)
    while state_of(cache.weights) == before:
        with open(cache.weights, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(cache.weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert state_of(cache.weights).mtime_ns == before.mtime_ns
    assert not cache.believes()


def flip(cache: Cache, at: int) -> None:
    data = bytearray(cache.file.read_bytes())
    data[at] ^= 1
    cache.file.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.with_name("there"))
    path.symlink_to(path.with_name("there"))


def pipe(cache: Cache) -> None:
    cache.file.unlink()
    os.mkfifo(cache.file)


def older(cache: Cache) -> None:
    cache.file.write_bytes(cache.file.read_bytes().replace(b"kvmesh weights 1", b"kvmesh weights 0"))


def unlike(cache: Cache) -> None:
    """Well made, but of something else."""
    cache.file.write_bytes(hash_cache._head(b'[["a"]]') + b'[["a"]]')


def long(cache: Cache) -> None:
    body = b" " * (8 << 20) + cache.file.read_bytes()[hash_cache._HEAD_BYTES :]
    cache.file.write_bytes(hash_cache._head(body) + body)


def another_user(_: Cache) -> None:
    """Which is the same as to be one."""
    uid = os.geteuid() + 1
    hash_cache.os.geteuid = lambda: uid


BROKEN: dict[str, Callable[[Cache], object]] = {
    "empty": lambda cache: cache.file.write_bytes(b""),
    "cut": lambda cache: os.truncate(cache.file, cache.file.stat().st_size - 1),
    "no utf-8": lambda cache: cache.file.write_bytes(b"\xff" * 300),
    "hash": lambda cache: flip(cache, 20),
    "head": lambda cache: flip(cache, 3),
    "body": lambda cache: flip(cache, 200),
    "older": older,
    "unlike": unlike,
    "long": long,
    "writable by others": lambda cache: cache.file.chmod(0o620),
    "in a folder writable by others": lambda cache: cache.folder.chmod(0o702),
    "a link": lambda cache: link(cache.file),
    "in a link": lambda cache: link(cache.folder),
    "a pipe": pipe,
    "a folder": lambda cache: (cache.file.unlink(), cache.file.mkdir()),
    "gone": lambda cache: cache.file.unlink(),
    "another user's": another_user,
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_damaged_or_not_ours_is_never_believed(
    cache: Cache, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.believes()
    monkeypatch.setattr(hash_cache.os, "geteuid", os.geteuid)
    BROKEN[name](cache)
    assert not cache.believes()
    # Nor is it an error, and where that can be, it is put right.
    cache.keep(WRONG)
    is_ours = "link" not in name and name not in ("a folder", "another user's", "in a folder writable by others")
    assert cache.believes() == (is_ours or name == "a link")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["replace", "fsencode"])
def test_a_full_disk_is_no_error(cache: Cache, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    if call == "replace":
        monkeypatch.setattr(hash_cache.os, "replace", full)
    else:
        monkeypatch.setattr(hash_cache.tempfile, "mkstemp", full)
    cache.keep(bytes([1]) * 32)
    assert cache.believes(), "as before"
    assert [file.name for file in cache.folder.iterdir()] == ["weights"]


@pytest.mark.parametrize("place", ["a file", "nowhere", "read-only"])
def test_without_a_place_everything_is_read(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "nowhere":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc" if place == "read-only" else str(cache.file))
    cache.keep(WRONG)
    assert not cache.believes()
    assert resolve_model(str(cache.model)).fingerprint


def test_a_relative_cache_home_is_ignored(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cache.keep(WRONG)
    assert cache.believes()
    assert (tmp_path / "home/.cache/kvmesh/weights").is_file()


def test_it_holds_the_last_thousand(cache: Cache) -> None:
    state = state_of(cache.weights)
    for first in (0, 800):
        keep_hashes({f"/f{number}": FileHash(state, WRONG, KEPT_S) for number in range(first, first + 800)})
    forget_hashes()
    found = find_hashes({f"/f{number}": state for number in range(1600)})
    assert set(found) == {f"/f{number}" for number in range(576, 1600)}


def test_what_a_killed_process_left_is_removed(cache: Cache) -> None:
    names = ["weights.old", "weights.new", "other.old"]
    for name in names:
        (cache.folder / name).write_bytes(b"half")
    for name in ("weights.old", "other.old"):
        os.utime(cache.folder / name, (1, 1))
    cache.keep(WRONG)
    assert {file.name for file in cache.folder.iterdir()} == {"weights", "weights.new", "other.old"}


def test_starts_at_the_same_time_leave_a_whole_file(cache: Cache) -> None:
    state = state_of(cache.weights)
    begin = threading.Barrier(4)

    def write(number: int) -> None:
        begin.wait()
        for index in range(20):
            keep_hashes({f"/f{number}/{index}": FileHash(state, WRONG, KEPT_S)})
            assert hash_cache._entries(), "there is always a whole one"

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    forget_hashes()
    last = [f"/f{number}/19" for number in range(4)]
    assert find_hashes(dict.fromkeys(last, state)), "of those that wrote at once, the last one"
    assert [file.name for file in cache.folder.iterdir()] == ["weights"]
