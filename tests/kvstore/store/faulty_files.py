"""A store's files in memory that fail as disks, kernels and mains do, and lanes whose work is done when a test says."""

import errno
import random
from collections.abc import Callable, Sequence

from typing_extensions import override

from kvstore.store.files import Page, PageFiles
from kvstore.store.lanes import Lane
from kvstore.store.place import HEAD_BYTES

SECTOR = 512
"""What a disk writes whole."""


class Killed(BaseException):
    """The process ends here: nothing of it may catch this."""


class SteppedLane(Lane):
    """Work waits for `step`. With a `draw`, any of what waits is next, as with several threads."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self.waiting: list[Callable[[], None]] = []
        self._draw = draw

    @override
    def submit(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def step(self) -> None:
        self.waiting.pop(self._draw.randrange(len(self.waiting)) if self._draw else 0)()

    @override
    def close(self) -> None:
        while self.waiting:
            self.step()


class FaultyFiles(PageFiles):
    """What processes see is in `seen`; what the disk has is in `durable`, until `write_back`, and behind it in part.

    `fail` is called before each call with its name and first slot, and may raise OSError. While `why_gone`, the files
    are taken away; `again` opens them anew, and may raise StoreError. `kill_in` writes from now
    the process is killed, in the midst of one; None: never.
    """

    why_buffered = ""

    def __init__(self, num_slots: int, page_bytes: int, draw: random.Random | None = None) -> None:
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self.seen = {"heads": bytearray(num_slots * HEAD_BYTES), "pages": bytearray(num_slots * page_bytes)}
        self.durable = {name: bytes(content) for name, content in self.seen.items()}
        self.fail: Callable[[str, int], None] = lambda name, first: None
        self.why_gone = ""
        self.again: Callable[[], None] = lambda: None
        self.kill_in: int | None = None
        self.is_closed = False
        self._draw = draw or random.Random(0)
        self._unsynced: list[tuple[str, int, bytes]] = []

    @override
    def read_heads(self, first: int, count: int) -> bytes:
        self.fail("read_heads", first)
        return bytes(self.seen["heads"][first * HEAD_BYTES : (first + count) * HEAD_BYTES])

    @override
    def write_heads(self, first: int, data: bytes) -> None:
        self.fail("write_heads", first)
        self._write("heads", first * HEAD_BYTES, data)

    @override
    def read_pages(self, first: int, pages: Sequence[Page]) -> None:
        self.fail("read_pages", first)
        at = first * self.page_bytes
        for view in (view for page in pages for view in page):
            found = self.seen["pages"][at : at + len(view)]
            if len(found) < len(view):
                raise OSError(errno.EIO, "the file ends")
            view[:] = found
            at += len(view)

    @override
    def write_pages(self, first: int, pages: Sequence[Page]) -> None:
        self.fail("write_pages", first)
        self._write("pages", first * self.page_bytes, b"".join(bytes(view) for page in pages for view in page))

    @override
    def look(self) -> str:
        return self.why_gone

    @override
    def try_out(self) -> None:
        self.fail("write_pages", self.num_slots)

    @override
    def renew(self) -> None:
        self.again()
        self.why_gone = ""

    @override
    def close(self) -> None:
        self.write_back()
        self.is_closed = True

    # what happens to disks

    def write_back(self) -> None:
        """The kernel has written everything."""
        self.durable = {name: bytes(content) for name, content in self.seen.items()}
        self._unsynced.clear()

    def cut_power(self) -> None:
        """Of each write since the last `write_back` some sectors are on the disk, in whatever order they were to be."""
        share = self._draw.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        after = {name: bytearray(content) for name, content in self.durable.items()}
        for name, start, data in self._unsynced:
            at = start
            while at < start + len(data):
                end = min(at - at % SECTOR + SECTOR, start + len(data))
                if self._draw.random() < share:
                    after[name][at:end] = data[at - start : end - start]
                at = end
        self.seen = after
        self.write_back()

    def flip(self, name: str, at: int) -> None:
        """One bit turns over."""
        self.seen[name][at] ^= 1 << self._draw.randrange(8)

    def _write(self, name: str, start: int, data: bytes) -> None:
        is_killed = False
        if self.kill_in is not None:
            self.kill_in -= 1
            is_killed = self.kill_in < 0
        if is_killed:
            # The kernel copies page by page; what lies within one is there whole or not at all.
            data = data[: self._draw.randrange(0, len(data) + SECTOR, SECTOR)]
        self.seen[name][start : start + len(data)] = data
        self._unsynced.append((name, start, bytes(data)))
        if is_killed:
            raise Killed
