"""Real files: every way in which pages get to the disk and back, and refusals of direct I/O at any time."""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.store.files import SlabFiles
from tests.kvstore.store.pages import content, page_hash

SLOTS = 4
KINDS = {
    "whole blocks, one rank": (8192, 1),
    "whole blocks, two ranks": (4096, 2),
    "not in blocks": (5000, 1),
    "two ranks fill a block together": (2048, 2),
    "two ranks, not in blocks": (3000, 2),
}
KIND = pytest.mark.parametrize(("page_bytes", "tp_size"), KINDS.values(), ids=list(KINDS))


def open_slab(folder: Path, page_bytes: int, tp_size: int) -> SlabFiles:
    flags = os.O_RDWR | os.O_CREAT
    heads, pages = (os.open(folder / name, flags, 0o600) for name in ("heads", "pages"))
    return SlabFiles(heads, pages, str(folder / "pages"), SLOTS, page_bytes, tp_size)


def aligned(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def rank_pages(count: int, page_bytes: int, tp_size: int, *, offset: int = 0) -> list[list[memoryview]]:
    """Memory for `count` pages, as pools have it: a rank's pages beside each other. `offset` takes its alignment."""
    pools = [aligned(count * page_bytes + offset)[offset:] for _ in range(tp_size)]
    return [[pool[page * page_bytes :][:page_bytes] for pool in pools] for page in range(count)]


def fill(pages: list[list[memoryview]], seed: str) -> list[list[bytes]]:
    for number, page in enumerate(pages):
        for rank, view in enumerate(page):
            view[:] = content(page_hash(seed, number, rank), len(view))
    return [[bytes(view) for view in page] for page in pages]


def refuse(
    monkeypatch: pytest.MonkeyPatch, name: str, when: Callable[[int], bool], code: int = errno.EINVAL
) -> list[int]:
    """Direct calls to `os.NAME` fail if `when` says so of their number; returns the list of all such calls."""
    real: Callable[..., Any] = getattr(os, name)
    calls: list[int] = []

    def called(descriptor: Any, *rest: Any) -> Any:
        flags = rest[0] if name == "open" else fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            calls.append(len(calls))
            if when(calls[-1]):
                raise OSError(code, os.strerror(code))
        return real(descriptor, *rest)

    monkeypatch.setattr(os, name, called)
    return calls


@pytest.fixture(params=["as the disk has it", "through the cache"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if request.param == "through the cache":
        refuse(monkeypatch, "open", lambda _: True)
    return tmp_path


@KIND
@pytest.mark.parametrize("offset", [0, 8])
def test_pages_come_back(folder: Path, page_bytes: int, tp_size: int, offset: int) -> None:
    files = open_slab(folder, page_bytes, tp_size)
    assert files.slot_bytes % 4096 == 0
    written = rank_pages(3, page_bytes, tp_size, offset=offset)
    one, two, three = fill(written, "a")
    files.write_pages(1, written)
    files.write_pages(0, written[2:])
    read = rank_pages(4, page_bytes, tp_size, offset=offset)
    files.read_pages(0, read)
    assert [[bytes(view) for view in page] for page in read] == [three, one, two, three]
    files.write_heads(2, b"h" * 128)
    assert files.read_heads(2, 2) == b"h" * 128
    assert files.read_heads(0, 2) in (b"", bytes(128))
    files.close()
    again = open_slab(folder, page_bytes, tp_size)
    again.read_pages(1, read[:1])
    assert [bytes(view) for view in read[0]] == one
    again.close()


@KIND
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
@pytest.mark.parametrize("at", [0, 1])
def test_direct_io_that_is_refused_at_a_call_goes_on_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int, tp_size: int, name: str, at: int
) -> None:
    calls = refuse(monkeypatch, name, lambda number: number >= at)
    files = open_slab(tmp_path, page_bytes, tp_size)
    if not calls:
        files.close()
        pytest.skip("this file system has no direct I/O")
    assert bool(files.why_buffered) == (at == 0), "found out at the start, by the first page"
    pages = rank_pages(2, page_bytes, tp_size)
    wanted = fill(pages, "a")
    files.write_pages(0, pages)
    read = rank_pages(2, page_bytes, tp_size)
    files.read_pages(0, read)
    assert [[bytes(view) for view in page] for page in read] == wanted
    assert files.why_buffered == "direct I/O was refused: Invalid argument"
    assert len(calls) == at + 1, "it is not asked again"
    files.close()


def test_other_errors_of_direct_io_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "pwritev", lambda number: number == 1, errno.EIO)
    files = open_slab(tmp_path, 4096, 1)
    if not files.why_buffered:
        with pytest.raises(OSError, match="Input/output error"):
            files.write_pages(0, rank_pages(1, 4096, 1))
    files.write_pages(0, rank_pages(1, 4096, 1))
    files.close()


def test_a_disk_that_gives_back_something_else_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: sum(map(len, views)))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="was not what was read"):
        open_slab(tmp_path, 4096, 1)
    # The two that it was given are the caller's; the third one is closed.
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2


@pytest.mark.parametrize("page_bytes", [4096, 5000])
def test_what_was_cut_off_is_an_error_and_not_old_memory(tmp_path: Path, page_bytes: int) -> None:
    files = open_slab(tmp_path, page_bytes, 1)
    os.truncate(tmp_path / "pages", files.slot_bytes + 100)
    pages = rank_pages(2, page_bytes, 1)
    files.read_pages(0, pages[:1])
    with pytest.raises(OSError, match="bytes were moved instead of"):
        files.read_pages(0, pages)
    files.write_heads(0, bytes(64))
    assert files.read_heads(0, 5) == bytes(64)
    files.close()


def test_more_pages_than_one_call_takes_go_through_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.files.MAX_BUFFERS", 1)
    files = open_slab(tmp_path, 4096, 1)
    pages = rank_pages(3, 4096, 1)
    wanted = fill(pages, "a")
    files.write_pages(0, pages)
    read = rank_pages(3, 4096, 1)
    files.read_pages(0, read)
    assert [[bytes(view) for view in page] for page in read] == wanted
    files.close()
