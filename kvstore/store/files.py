"""The two files of a store: heads, and pages, which are read and written past the kernel's cache where that works.

    heads   4096 bytes that say whose pages these are (`directory.py`), then 64 bytes for each slot
    pages   a slot after another, and one more for trying out how the file can be written

A slot holds one page of all ranks, one rank's bytes after another's, and begins on a multiple of 4096 bytes. Memory
that is aligned so, as a pool's is if its pages are multiples of 4096 bytes, goes to the disk as it is; other memory
through a buffer that each thread has. Whether the file system takes direct I/O is learned by writing and reading a page
in the way that all pages go; some accept it when a file is opened and refuse it at the first write.

Two files and not one: a store of another size then has every page where it was, and heads, which the kernel caches,
never share its cache with pages that go past it.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvstore.store.place import ALIGNMENT, HEAD_BYTES, HEADER_BYTES, slot_bytes_of

MAX_BUFFERS: Final = 1024
"""Buffers in one call (IOV_MAX of Linux)."""
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_Bytes = npt.NDArray[np.uint8]
_Call = Callable[[int, Sequence[memoryview], int], int]

Page = Sequence[memoryview]
"""One page in memory: its bytes at each rank, by rank, all of one length."""


class PageFiles(Protocol):
    """The storage of a store, from which all I/O goes; every call blocks, and may come from any thread.

    Raises OSError where something could not be read or written, wholly.
    """

    num_slots: int
    why_buffered: str
    """Why pages go through the kernel's cache; empty while they do not."""

    def read_heads(self, first: int, count: int) -> bytes:
        """The heads of `count` slots, as they are; shorter where the file ends."""
        ...

    def write_heads(self, first: int, data: bytes) -> None:
        """Overwrite the heads of slots `first` and following."""
        ...

    def read_pages(self, first: int, pages: Sequence[Page]) -> None:
        """Fill `pages` from slots `first` and following."""
        ...

    def write_pages(self, first: int, pages: Sequence[Page]) -> None:
        """Overwrite slots `first` and following by `pages`."""
        ...

    def look(self) -> str:
        """Why these are not the store's files any more; empty while they are, or if nobody can take them away."""
        return ""

    def try_out(self) -> None:
        """Write and read a page where none is kept."""
        ...

    def renew(self) -> None:
        """Open the store's files anew, while no other call is under way. Raises StoreError of every kind."""
        ...

    def close(self) -> None:
        """Let others have the store. Everything written is on the disk afterwards, or OSError is raised."""
        ...


class SlabFiles(PageFiles):
    """`PageFiles` of two open descriptors, which it owns. Raises OSError if a page cannot be written and read at all.

    `pages_path` is opened a second time for direct I/O.
    """

    def __init__(self, heads: int, pages: int, pages_path: str, num_slots: int, page_bytes: int, tp_size: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes_of(page_bytes, tp_size)
        self.why_buffered = ""
        self._heads, self._pages = heads, pages
        self._page_bytes, self._tp_size = page_bytes, tp_size
        self._is_padded = self.slot_bytes != page_bytes * tp_size
        # Between ranks, too: the second one's bytes begin where the first one's end.
        self._is_straight = not self._is_padded and page_bytes % ALIGNMENT == 0
        # One buffer for each thread, of the longest run that it was given.
        self._local = threading.local()
        self._direct = -1
        try:
            self._choose(pages_path)
        except BaseException:
            # Also if interrupted: the caller closes what it gave, and does not know of this one.
            self._close_direct()
            raise

    @override
    def read_heads(self, first: int, count: int) -> bytes:
        return os.pread(self._heads, count * HEAD_BYTES, HEADER_BYTES + first * HEAD_BYTES)

    @override
    def write_heads(self, first: int, data: bytes) -> None:
        _require_whole(os.pwrite(self._heads, data, HEADER_BYTES + first * HEAD_BYTES), len(data))

    @override
    def read_pages(self, first: int, pages: Sequence[Page]) -> None:
        views = self._straight(pages)
        if views is not None:
            self._move(os.preadv, first, views)
            return
        buffer = self._buffer(len(pages))
        self._move(os.preadv, first, [buffer])
        for view, part in self._beside(pages, buffer):
            view[:] = part

    @override
    def write_pages(self, first: int, pages: Sequence[Page]) -> None:
        views = self._straight(pages)
        if views is not None:
            self._move(os.pwritev, first, views)
            return
        buffer = self._buffer(len(pages))
        for view, part in self._beside(pages, buffer):
            part[:] = view
        self._move(os.pwritev, first, [buffer])

    @override
    def close(self) -> None:
        try:
            for descriptor in self.descriptors:
                os.fdatasync(descriptor)
        finally:
            self.let_go()

    @property
    def descriptors(self) -> list[int]:
        """Of pages and heads, while they are open."""
        return [one for one in (self._pages, self._heads) if one >= 0]

    def let_go(self) -> None:
        """Close everything, whether it is on the disk or not. Every call raises OSError from then on."""
        # The heads last: their lock is the store's.
        for descriptor in reversed(self.give_up()):
            if descriptor >= 0:
                os.close(descriptor)

    def take_over(self, other: "SlabFiles") -> None:
        """Go on with what `other` has open, which is closed from then on."""
        self._heads, self._pages, self._direct = other.give_up()
        self.why_buffered = other.why_buffered

    def give_up(self) -> tuple[int, int, int]:
        """The descriptors of heads, pages, and pages for direct I/O (or -1), which are the caller's now."""
        given = self._heads, self._pages, self._direct
        self._heads = self._pages = self._direct = -1
        return given

    def _choose(self, path: str) -> None:
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | _DIRECT)
        except OSError as error:
            self._fall_back(error)
        self.try_out()

    @override
    def try_out(self) -> None:
        # In the slot behind all others. Falls back by itself where `_move` does.
        with contextlib.closing(mmap.mmap(-1, 2 * self.slot_bytes)) as memory, memoryview(memory) as both:
            written, read = both[: self.slot_bytes], both[self.slot_bytes :]
            written[:] = bytes(range(256)) * (self.slot_bytes // 256)
            with written, read:
                self._move(os.pwritev, self.num_slots, [written])
                self._move(os.preadv, self.num_slots, [read])
                if written == read:
                    return
        raise OSError(errno.EIO, "what was written was not what was read")

    def _move(self, call: _Call, first: int, views: Sequence[memoryview]) -> None:
        offset, wanted = first * self.slot_bytes, sum(map(len, views))
        if self._direct >= 0 and not self.why_buffered:
            try:
                _require_whole(call(self._direct, views, offset), wanted)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back(error)
        _require_whole(call(self._pages, views, offset), wanted)

    def _fall_back(self, error: OSError) -> None:
        # For good, and not closed: another thread may be in a call on it.
        self.why_buffered = f"direct I/O was refused: {error.strerror}"

    def _close_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def _straight(self, pages: Sequence[Page]) -> list[memoryview] | None:
        """The memory of `pages` in the file's order, if it can be read and written as it is."""
        if not self._is_straight or len(pages) * self._tp_size > MAX_BUFFERS:
            return None
        views = [view for page in pages for view in page]
        return views if all(_address(view) % ALIGNMENT == 0 for view in views) else None

    def _buffer(self, num_pages: int) -> memoryview:
        """This thread's own, aligned."""
        needed = num_pages * self.slot_bytes
        held: memoryview | None = getattr(self._local, "buffer", None)
        if held is None or len(held) < needed:
            held = self._local.buffer = memoryview(mmap.mmap(-1, needed))
        return held[:needed]

    def _beside(self, pages: Sequence[Page], buffer: memoryview) -> list[tuple[_Bytes, _Bytes]]:
        """Each rank's bytes of each page, and where they lie in `buffer`; as arrays, which copy without the GIL."""
        whole = np.frombuffer(buffer, np.uint8)
        size, slot_bytes = self._page_bytes, self.slot_bytes
        return [
            (np.frombuffer(view, np.uint8), whole[at * slot_bytes + rank * size :][:size])
            for at, page in enumerate(pages)
            for rank, view in enumerate(page)
        ]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _require_whole(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(errno.EIO, f"{done} bytes were moved instead of {wanted}: the file or the disk ends there")
