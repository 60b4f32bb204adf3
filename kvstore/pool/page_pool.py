"""The memory of one pool: a header, the page table, the pages, in one file that outlives the process that made it.

    0                  header (`header.py`): what follows, as `PoolInfo`
    info.table_offset  page table (`kvstore/cache/page_table.py`)
    info.pages_offset  pages, `info.layout.page_bytes` each; both offsets are multiples of 4096

If the pages are on a device, the file ends at `pages_offset`: its header says how a process that computes there opens
them (`cuda/pool.py`), and a process that only reads the page table never touches the device.

A kv_agent creates pools and holds each file's flock for as long as it lives; workers, schedulers and other agents map
them by path. Not `multiprocessing.shared_memory`: on Python 3.11 the death of a process that had only attached unlinks
the segment. `MemoryHost` is the seam: `ShmHost` for processes, `HeapHost` for simulations and tests, and `CudaHost`
(`cuda/pool.py`) over either for pages on a device.
"""

import contextlib
import errno
import fcntl
import glob
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from typing_extensions import override

from kvstore.cache.page_table import PageTable
from kvstore.errors import (
    PagesElsewhere,
    PoolBusy,
    PoolClosed,
    PoolDenied,
    PoolExhaustedMemory,
    PoolForeign,
    PoolMissing,
)
from kvstore.pool.device import CPU, DevicePages
from kvstore.pool.header import HEADER_BYTES, PoolInfo, decode_header, encode_header

_DENIED: Final = "a KV pool must be a plain file of this user: have it removed, or give the mesh another --name"


class PagePool:
    """One pool's memory, mapped; it can go away once no view is held. `num_pages` counts the padding page too."""

    def __init__(self, path: str, info: PoolInfo, memory: memoryview, on_close: Callable[[], None]) -> None:
        self.path = path
        self.info = info
        # An agent may mark its pool, which changes `info`, but never its size or shape.
        self.num_pages, self.layout = info.num_pages, info.layout
        self._on_close = on_close
        self._page_bytes = info.layout.page_bytes
        self._memory: memoryview | None = memory
        self._table_view = memory[info.table_offset : info.pages_offset]
        self._pages_view = memory[info.pages_offset : info.file_bytes]
        self._open_device: Callable[[], DevicePages] | None = None

    def attach_device(self, open_pages: Callable[[], DevicePages], on_close: Callable[[], None]) -> None:
        """Set how the pages on the device are opened, on first use, and how they are closed with the pool."""
        # The device first: the header in the file describes its pages.
        close_file = self._on_close

        def close() -> None:
            try:
                on_close()
            finally:
                close_file()

        self._open_device, self._on_close = open_pages, close

    @property
    def pages_view(self) -> memoryview:
        """All pages as bytes, `num_pages * layout.page_bytes`. Raises PagesElsewhere if they are on a device."""
        self._require_open()
        if self.info.device != CPU:
            raise PagesElsewhere(f"the pages of {self.path} are on {self.info.device}: see device_pages")
        return self._pages_view

    @property
    def device_pages(self) -> DevicePages:
        """Opened in this process. Raises PagesElsewhere if in the file or if only tables are mapped; DeviceError."""
        self._require_open()
        if self._open_device is None:
            where = "are in its file" if self.info.device == CPU else f"on {self.info.device} are not mapped here"
            raise PagesElsewhere(
                f"the pages of {self.path} {where}: pools of CUDA devices are opened through a CudaHost"
            )
        return self._open_device()

    @property
    def table_view(self) -> memoryview:
        self._require_open()
        return self._table_view

    def page(self, page: int) -> memoryview:
        """Bytes of one page over all layers. Raises IndexError outside the pool, PagesElsewhere as `pages_view`."""
        pages = self.pages_view
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} is not in a pool of {self.num_pages}")
        return pages[page * self._page_bytes : (page + 1) * self._page_bytes]

    def table(self) -> PageTable:
        """The page table; only the pool's scheduler may write through it."""
        return PageTable(self.table_view, self.num_pages, self.layout.page_size)

    def close(self) -> None:
        """Unmap and release the lock. Idempotent. Memory that is still viewed is unmapped with its last view."""
        if self._memory is not None:
            for view in (self._table_view, self._pages_view, self._memory):
                # A tensor made from a view keeps it alive; the mapping then goes with the tensor.
                with contextlib.suppress(BufferError):
                    view.release()
            self._memory = None
            self._on_close()

    def _require_open(self) -> memoryview:
        if self._memory is None:
            raise PoolClosed(f"the pool at {self.path} is closed")
        return self._memory


class MemoryHost(Protocol):
    """Where pools live. Paths are plain strings that mean something to this host only."""

    def create(self, name: str, info: PoolInfo) -> PagePool:
        """Zeroed and owned; replaces an unowned one. Raises PoolExhaustedMemory, PoolBusy, PoolDenied, PoolMismatch."""
        ...

    def open(self, path: str, *, writable: bool, own: bool = False) -> PagePool:
        """Map a pool; `own` locks it. Raises PoolMissing, PoolDenied, PoolForeign, PoolTorn, PoolBusy (if `own`)."""
        ...

    def path(self, name: str) -> str:
        """Path of the pool called `name`, whether it exists or not."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a pool's name; existing mappings stay valid. Harmless if there is no such pool."""
        ...

    def mark(self, path: str, info: PoolInfo) -> None:
        """Overwrite the header of an own pool; its sizes must not change. Raises PoolMissing, PoolDenied."""
        ...


class HeapHost(MemoryHost):
    """Pools as bytearrays of one process. No locks: inside it a crashed owner cannot be told from a living one."""

    def __init__(self) -> None:
        self._pools: dict[str, bytearray] = {}

    @override
    def path(self, name: str) -> str:
        return f"heap:{name}"

    @override
    def create(self, name: str, info: PoolInfo) -> PagePool:
        path = self.path(name)
        header = encode_header(info)
        memory = bytearray(info.file_bytes)
        memory[:HEADER_BYTES] = header
        self._pools[path] = memory
        return PagePool(path, info, memoryview(memory), lambda: None)

    @override
    def open(self, path: str, *, writable: bool, own: bool = False) -> PagePool:
        memory = self._pools.get(path)
        if memory is None:
            raise PoolMissing(f"there is no pool at {path}: its kv_agent has not made it, or has removed it")
        info = decode_header(bytes(memory[:HEADER_BYTES]), path, len(memory))
        view = memoryview(memory)
        return PagePool(path, info, view if writable else view.toreadonly(), lambda: None)

    @override
    def unlink(self, path: str) -> None:
        self._pools.pop(path, None)

    @override
    def mark(self, path: str, info: PoolInfo) -> None:
        if path not in self._pools:
            raise PoolMissing(f"there is no pool at {path}: it was removed")
        self._pools[path][:HEADER_BYTES] = encode_header(info)

    def paths(self) -> list[str]:
        """Pools that exist, for leak checks in tests."""
        return sorted(self._pools)


class ShmHost(MemoryHost):
    """Pools as files, under /dev/shm or any other memory file system.

    The owner's flock tells a living pool from a leftover: `sweep` removes pools that nobody owns. A pool appears under
    its name only once it is whole; if its creation is cut short, `sweep` finds the file.
    """

    def __init__(self, directory: str | Path = "/dev/shm") -> None:
        self.directory = Path(directory)

    @override
    def path(self, name: str) -> str:
        return str(self.directory / name)

    @override
    def create(self, name: str, info: PoolInfo) -> PagePool:
        path = self.path(name)
        header = encode_header(info)
        with contextlib.suppress(PoolMissing):
            self._require_unowned(path)
        # Under another name until it is whole: opening the real name never finds a pool without header or pages.
        making = f"{path}.making.{os.getpid()}"
        descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Locked before it has any size, so that a concurrent `sweep` sees it as owned.
            self._reserve(descriptor, path, info.file_bytes)
            os.pwrite(descriptor, header, 0)
            pool = _map_file(descriptor, path, info, writable=True, populate=True)
            os.rename(making, path)
        except BaseException:
            # Also if interrupted: the flock goes with the descriptor, and the half-made file would take up memory.
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(making)
            raise
        return pool

    @override
    def open(self, path: str, *, writable: bool, own: bool = False) -> PagePool:
        descriptor = _open_own(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            if own:
                _lock(descriptor, path)
            status = os.fstat(descriptor)
            # Pages hold people's prompts, and this file's header decides what is mapped.
            if status.st_mode & 0o077:
                raise PoolForeign(f"{path} can be opened by other users ({stat.filemode(status.st_mode)}): remove it")
            info = decode_header(os.pread(descriptor, HEADER_BYTES, 0), path, status.st_size)
            pool = _map_file(descriptor, path, info, writable=writable, keep=own)
        except BaseException:
            # Also if interrupted: an open descriptor would hold the flock, and keep the pool from the next agent.
            os.close(descriptor)
            raise
        if not own:
            os.close(descriptor)
        return pool

    @override
    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    @override
    def mark(self, path: str, info: PoolInfo) -> None:
        """One write of one page: a process that is killed has written all of it or nothing."""
        descriptor = _open_own(path, os.O_RDWR)
        try:
            os.pwrite(descriptor, encode_header(info), 0)
        finally:
            os.close(descriptor)

    def sweep(self, prefix: str) -> list[str]:
        """Remove this user's plain files of this prefix that nobody owns, left by killed agents. Returns the paths."""
        removed: list[str] = []
        for path in sorted(self.directory.glob(f"{glob.escape(prefix)}*")):
            try:
                self._require_unowned(str(path))
            # In use, somebody else's, or gone since the listing: not ours to remove.
            except (PoolBusy, PoolDenied, PoolMissing):
                continue
            self.unlink(str(path))
            removed.append(str(path))
        return removed

    @staticmethod
    def _require_unowned(path: str) -> None:
        descriptor = _open_own(path, os.O_RDONLY)
        try:
            _lock(descriptor, path)
        finally:
            os.close(descriptor)

    @staticmethod
    def _reserve(descriptor: int, path: str, num_bytes: int) -> None:
        """Take the memory now: a full file system is an error here, not a SIGBUS in a worker later."""
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise
            # What the failed call took still counts as used: give it back first, so that the error has the true figure.
            os.ftruncate(descriptor, 0)
            status = os.fstatvfs(descriptor)
            raise PoolExhaustedMemory(path, num_bytes, status.f_bavail * status.f_frsize) from None


def _open_own(path: str, flags: int) -> int:
    """A descriptor of a plain file that belongs to this user. Raises PoolMissing or PoolDenied.

    Shared memory file systems are open to all: other users could read and write a file that they put under our name.
    """
    try:
        # Do not follow a link that somebody left there, nor block forever on a pipe that has our name.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise PoolMissing(f"there is no pool at {path}: its kv_agent has not made it yet, or has removed it") from None
    except OSError as error:
        raise PoolDenied(f"{path} cannot be opened ({error.strerror}); {_DENIED}") from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
        return descriptor
    os.close(descriptor)
    raise PoolDenied(f"{path} is {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}; {_DENIED}")


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PoolBusy(f"{path} belongs to another process that is alive; stop it, or choose another name") from None


def _map_file(
    descriptor: int, path: str, info: PoolInfo, *, writable: bool, keep: bool = True, populate: bool = False
) -> PagePool:
    """Map a segment. `populate` makes the page faults happen now rather than in the first transfers."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    mapping = mmap.mmap(descriptor, info.file_bytes, flags=flags, prot=protection)

    def close() -> None:
        # Views of single pages that are still in use keep the mapping alive; it goes with the last of them.
        with contextlib.suppress(BufferError):
            mapping.close()
        if keep:
            # The mapping has its own descriptor with the same lock, which a view may keep alive.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    return PagePool(path, info, memoryview(mapping), close)
