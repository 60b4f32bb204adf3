"""Which directories are taken, whose stores are in them, and what is said of those that cannot be used."""

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from kvstore.errors import (
    StoreBusy,
    StoreDenied,
    StoreError,
    StoreExhaustedSpace,
    StoreForeign,
    StoreMissing,
    StoreReadOnly,
    StoreTooSmall,
    StoreUnlockable,
)
from kvstore.store import directory as directory_module
from kvstore.store.directory import open_files
from kvstore.store.place import StoreIdentity, find_stores
from tests.kvstore.store.pages import content, page_hash
from tests.simulation.planting import Patches, around, first_caught, nothing

PAGE = 4096
OURS = StoreIdentity(host="one", layout_digest=b"l" * 16, page_bytes=PAGE, tp_size=2, numerics="torch, AVX2")
SLOT = OURS.slot_bytes + 64
SIZE = 4096 + OURS.slot_bytes + 10 * SLOT

pytestmark = pytest.mark.usefixtures("private")


@pytest.fixture
def private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_store_is_this_users_alone_and_its_space_is_reserved(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        files = open_files(tmp_path, OURS, SIZE)
    finally:
        os.umask(old)
    folder = tmp_path / OURS.folder
    assert (mode(folder), mode(folder / "heads"), mode(folder / "pages")) == (0o700, 0o600, 0o600)
    assert files.num_slots == 10
    (found,) = find_stores(tmp_path)
    assert (found.path, found.identity) == (folder, OURS)
    assert SIZE <= found.num_bytes <= SIZE + 8192, "blocks are taken, not promised"
    files.close()


@pytest.mark.parametrize(
    "other",
    [
        {"host": "two"},
        {"layout_digest": b"m" * 16},
        {"numerics": "torch, AVX512"},
        {"tp_size": 1, "page_bytes": 2 * PAGE},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_others_have_stores_of_their_own(tmp_path: Path, other: dict[str, Any]) -> None:
    theirs = msgspec.structs.replace(OURS, **other)
    ours = open_files(tmp_path, OURS, SIZE)
    files = open_files(tmp_path, theirs, SIZE)
    ours.write_heads(0, b"ours" * 16)
    assert files.read_heads(0, 1) == bytes(64)
    assert {found.identity for found in find_stores(tmp_path)} == {OURS, theirs}
    files.close()
    ours.close()


def test_a_store_has_one_owner_and_another_one_when_that_is_gone(tmp_path: Path) -> None:
    files = open_files(tmp_path, OURS, SIZE)
    with pytest.raises(StoreBusy, match="another KV agent"):
        open_files(tmp_path, OURS, SIZE)
    files.close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"open\n"
    with pytest.raises(StoreBusy):
        open_files(tmp_path, OURS, SIZE)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    open_files(tmp_path, OURS, SIZE).close()


HOLDER = """
import sys
from tests.kvstore.store.test_directory import OURS
from kvstore.store.directory import open_files
files = open_files(sys.argv[1], OURS, int(sys.argv[2]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_store_of_another_size_keeps_the_pages_that_fit(tmp_path: Path) -> None:
    pages = [[view, view] for (view,) in memory_of(10)]
    files = open_files(tmp_path, OURS, SIZE)
    files.write_pages(0, pages)
    files.write_heads(0, b"".join(bytes([number]) * 64 for number in range(1, 11)))
    files.close()
    for num_slots, known in ((4, 4), (20, 4)):
        files = open_files(tmp_path, OURS, 4096 + OURS.slot_bytes + num_slots * SLOT)
        assert files.num_slots == num_slots
        heads = files.read_heads(0, num_slots)
        assert heads == b"".join(bytes([number]) * 64 for number in range(1, known + 1)).ljust(64 * num_slots, b"\0")
        back = [[memoryview(bytearray(PAGE)) for _ in range(2)]]
        files.read_pages(3, back)
        assert bytes(back[0][0]) == content(page_hash(3), PAGE)
        files.close()


def memory_of(count: int) -> list[list[memoryview]]:
    return [[memoryview(bytearray(content(page_hash(number), PAGE)))] for number in range(count)]


def test_what_was_cut_off_is_there_again_but_empty(tmp_path: Path) -> None:
    open_files(tmp_path, OURS, SIZE).close()
    for name in ("heads", "pages"):
        os.truncate(tmp_path / OURS.folder / name, 4096)
    files = open_files(tmp_path, OURS, SIZE)
    assert files.read_heads(0, 10) == bytes(640)
    files.close()
    (tmp_path / OURS.folder / "pages").unlink()
    open_files(tmp_path, OURS, SIZE).close()


# bad directories


def a_file(path: Path) -> None:
    path.write_text("")


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def of_another(path: Path) -> None:
    path.mkdir()
    os.chown(path, 12345, -1)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda path: None, StoreMissing, "No such file"),
        (a_file, StoreMissing, "is no directory"),
        (open_to_all, StoreDenied, "nobody else can write"),
        pytest.param(of_another, StoreDenied, "belongs to user 12345", marks=AS_ROOT),
    ],
    ids=["missing", "a file", "open to all", "another user's"],
)
def test_directories_that_are_not_ours(
    tmp_path: Path, make: Callable[[Path], None], error: type[StoreError], words: str
) -> None:
    path = tmp_path / "kv"
    make(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words) as raised:
        open_files(path, OURS, SIZE)
    assert str(path) in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before, "nothing was made there"


def test_a_directory_like_tmp_is_taken(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    open_files(tmp_path, OURS, SIZE).close()


def folder_open_to_all(folder: Path) -> None:
    folder.chmod(0o755)


def folder_linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def file_linked(folder: Path) -> None:
    (folder / "pages").rename(folder / "others")
    (folder / "pages").symlink_to(folder / "others")


def file_open_to_all(folder: Path) -> None:
    (folder / "pages").chmod(0o644)


def file_of_another(folder: Path) -> None:
    os.chown(folder / "pages", 12345, -1)


def a_pipe(folder: Path) -> None:
    (folder / "pages").unlink()
    os.mkfifo(folder / "pages", 0o600)


def a_directory(folder: Path) -> None:
    (folder / "pages").unlink()
    (folder / "pages").mkdir()


def other_magic(folder: Path) -> None:
    overwrite(folder, 0, b"GIF89a")


def other_version(folder: Path) -> None:
    overwrite(folder, 8, b"\x02")


def flipped(folder: Path) -> None:
    overwrite(folder, 40, b"\xff")


def overwrite(folder: Path, at: int, data: bytes) -> None:
    with (folder / "heads").open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (folder_open_to_all, StoreDenied, "others could read"),
        (folder_linked, StoreMissing, "is no directory"),
        (file_linked, StoreDenied, "cannot be opened"),
        (file_open_to_all, StoreDenied, "plain file that only this user"),
        pytest.param(file_of_another, StoreDenied, "plain file that only this user", marks=AS_ROOT),
        (a_pipe, StoreDenied, "plain file that only this user"),
        (a_directory, StoreDenied, "Is a directory"),
        (other_magic, StoreForeign, "is not a store"),
        (other_version, StoreForeign, "format 2, but this version reads format 1"),
        (flipped, StoreForeign, "its header is damaged"),
    ],
)
def test_a_store_that_somebody_has_changed_is_left_alone(
    tmp_path: Path, damage: Callable[[Path], None], error: type[StoreError], words: str
) -> None:
    open_files(tmp_path, OURS, SIZE).close()
    damage(tmp_path / OURS.folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=words):
        open_files(tmp_path, OURS, SIZE)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    # Another one may lie beside it.
    open_files(tmp_path, msgspec.structs.replace(OURS, numerics="other"), SIZE).close()
    assert len(find_stores(tmp_path)) >= 1


def test_a_store_whose_header_cannot_be_read_is_still_listed(tmp_path: Path) -> None:
    for damage in (b"\xff", b"\x91" * 3000):
        open_files(tmp_path, OURS, SIZE).close()
        overwrite(tmp_path / OURS.folder, 16, damage)
        (found,) = find_stores(tmp_path)
        assert found.identity is None
        (tmp_path / OURS.folder / "heads").unlink()
    assert find_stores(tmp_path) == [], "without heads it is none"


@pytest.mark.parametrize("size", [-1, 0, PAGE, SIZE - 10 * SLOT, SIZE - 9 * SLOT - 1])
def test_a_size_without_room_for_a_page(tmp_path: Path, size: int) -> None:
    with pytest.raises(StoreTooSmall, match="8256 for each page"):
        open_files(tmp_path, OURS, size)
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_too_long_for_a_header(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="shorten them"):
        open_files(tmp_path, msgspec.structs.replace(OURS, numerics="n" * 5000), SIZE)


# what file systems say


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize(
    ("owner", "name", "code", "error", "words"),
    [
        (fcntl, "flock", errno.ENOLCK, StoreUnlockable, "has no locks"),
        (fcntl, "flock", errno.EOPNOTSUPP, StoreUnlockable, "name a directory on a local disk"),
        (fcntl, "flock", errno.EIO, StoreError, "cannot be used .Input/output error"),
        (os, "posix_fallocate", errno.ENOSPC, StoreExhaustedSpace, "bytes left, but the store takes"),
        (os, "posix_fallocate", errno.EDQUOT, StoreExhaustedSpace, "other stores there: none"),
        (os, "posix_fallocate", errno.EIO, StoreError, "cannot be used"),
        (os, "open", errno.EROFS, StoreReadOnly, "read-only file system"),
        (os, "open", errno.EACCES, StoreDenied, "Permission denied"),
        (os, "preadv", errno.EIO, StoreError, "Input/output error"),
    ],
)
def test_file_systems_that_cannot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    code: int,
    error: type[StoreError],
    words: str,
) -> None:
    with monkeypatch.context() as patched:
        failing(patched, owner, name, code)
        with pytest.raises(StoreError, match=words) as raised:
            open_files(tmp_path, OURS, SIZE)
    assert type(raised.value) is error
    open_files(tmp_path, OURS, SIZE).close()


def test_a_disk_too_full_to_grow_leaves_the_store_as_it_was_and_names_others(tmp_path: Path) -> None:
    other = msgspec.structs.replace(OURS, host="two")
    for identity in (OURS, other):
        files = open_files(tmp_path, identity, SIZE)
        files.write_heads(9, b"h" * 64)
        files.close()
    before = os.stat(tmp_path / OURS.folder / "pages").st_size
    # More than any disk, so that the call really fails.
    with pytest.raises(StoreExhaustedSpace, match=f"other stores there: {tmp_path / other.folder} "):
        open_files(tmp_path, OURS, 1 << 50)
    assert os.stat(tmp_path / OURS.folder / "pages").st_size == before
    files = open_files(tmp_path, OURS, SIZE)
    assert files.read_heads(9, 1) == b"h" * 64
    files.close()


def test_a_header_that_was_never_written_is_written_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(directory_module, "_take_header", lambda *_: None)
        open_files(tmp_path, OURS, SIZE).close()
    open_files(tmp_path, OURS, SIZE).close()
    assert [found.identity for found in find_stores(tmp_path)] == [OURS]


# planted bugs: in each pair, what only both together break


def a_store_has_one_owner(directory: Path) -> None:
    with contextlib.ExitStack() as held:
        held.callback(open_files(directory, OURS, SIZE).close)
        with contextlib.suppress(StoreBusy):
            held.callback(open_files(directory, OURS, SIZE).close)
            raise AssertionError("there are two owners")


def other_numerics_find_nothing(directory: Path) -> None:
    files = open_files(directory, OURS, SIZE)
    files.write_heads(0, b"ours" * 16)
    files.close()
    files = open_files(directory, msgspec.structs.replace(OURS, numerics="other"), SIZE)
    found = files.read_heads(0, 1)
    files.close()
    assert found == bytes(64)


def what_grows_again_is_empty(directory: Path) -> None:
    files = open_files(directory, OURS, SIZE)
    files.write_heads(9, b"h" * 64)
    files.close()
    open_files(directory, OURS, SIZE - 5 * SLOT).close()
    files = open_files(directory, OURS, SIZE)
    found = files.read_heads(9, 1)
    files.close()
    assert found == bytes(64)


def pages_are_private(directory: Path) -> None:
    open_files(directory, OURS, SIZE).close()
    assert mode(directory / OURS.folder) == 0o700


PLANTED: dict[str, tuple[Callable[[Path], None], Patches]] = {
    "nobody locks": (a_store_has_one_owner, [around(directory_module, "_lock", nothing)]),
    "numerics are in no name and no header": (
        other_numerics_find_nothing,
        [
            lambda: patch.object(StoreIdentity, "folder", property(lambda self: f"kv-{self.host}")),
            around(directory_module, "_take_header", nothing),
        ],
    ),
    "what is cut off is kept": (
        what_grows_again_is_empty,
        [around(os, "ftruncate", nothing)],
    ),
    "a folder is open to all": (pages_are_private, [around(directory_module, "_PRIVATE", 0o755)]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(tmp_path: Path, name: str) -> None:
    check, patches = PLANTED[name]
    (tmp_path / "sound").mkdir(0o700)
    check(tmp_path / "sound")
    assert first_caught(patches, lambda _: check(tmp_path), most=1)
