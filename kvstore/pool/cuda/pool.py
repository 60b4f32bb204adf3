"""Pools whose pages are on a CUDA device: header and page table in a file, as for any pool, pages in one allocation.

The process that makes a pool (a kv_agent) allocates its pages, exports them, and writes the header with the handle
last. Others open the file; asking their mapping for `device_pages` opens the handle too, once per process however many
mappings there are. A mapping by a plain `ShmHost`, as schedulers make it, shows the page table only and never touches
CUDA. Pages die with the process that made them, so an agent never takes over a pool that it finds on a device; it makes
the pool again, and the new incarnation tells everybody to map it again.

Pools in host memory pass through unchanged, and CuPy is loaded only when pages on a device are used.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from typing_extensions import override

from kvstore.errors import DeviceHandleInvalid, PoolClosed
from kvstore.pool.cuda.memory import HANDLE_BYTES, DeviceMemory, load_cupy_memory
from kvstore.pool.device import CPU, DevicePages, cuda_ordinal
from kvstore.pool.header import PoolInfo
from kvstore.pool.page_pool import MemoryHost, PagePool


class _Incarnation(NamedTuple):
    """One incarnation of a pool, the key of its pages in this process."""

    path: str
    incarnation: int


class CudaHost(MemoryHost):
    """Pools with pages on CUDA devices. `tables` keeps headers and page tables; `load` returns the devices' memory."""

    def __init__(self, tables: MemoryHost, load: Callable[[], DeviceMemory] = load_cupy_memory) -> None:
        self._tables = tables
        self._load = load
        self._memory: DeviceMemory | None = None
        self._made: dict[_Incarnation, DevicePages] = {}
        self._opened: dict[_Incarnation, tuple[DevicePages, int]] = {}

    @property
    def memory(self) -> DeviceMemory:
        """The devices' memory, loaded when first used. Raises DeviceUnavailable."""
        if self._memory is None:
            self._memory = self._load()
        return self._memory

    @override
    def path(self, name: str) -> str:
        return self._tables.path(name)

    @override
    def create(self, name: str, info: PoolInfo) -> PagePool:
        """Closing the pool frees pages on a device. Also raises DeviceError and DeviceExhaustedMemory."""
        if info.device == CPU or info.is_freed:
            return self._tables.create(name, info)
        device = cuda_ordinal(info.device)
        pages = DevicePages(device, self.memory.allocate(device, info.pages_bytes), info.pages_bytes)
        try:
            handle = self.memory.export(device, pages.pointer)
            pool = self._tables.create(name, msgspec.structs.replace(info, ipc_handle=handle))
        except BaseException:
            # Nobody else knows of these pages: if not freed here, they stay allocated until the process ends.
            self.memory.free(device, pages.pointer)
            raise
        incarnation = _Incarnation(pool.path, pool.info.incarnation)
        self._made[incarnation] = pages

        def free() -> None:
            del self._made[incarnation]
            self.memory.free(device, pages.pointer)

        pool.attach_device(lambda: pages, free)
        return pool

    @override
    def open(self, path: str, *, writable: bool, own: bool = False) -> PagePool:
        """`device_pages` opens pages on a device, or raises DeviceError; no work may use them after `close`."""
        pool = self._tables.open(path, writable=writable, own=own)
        # Only prepared: a process that just reads the page table never makes a context on the device.
        if pool.info.device != CPU and not pool.info.is_freed:
            use = _Use(self, pool)
            pool.attach_device(use.pages, use.close)
        return pool

    @override
    def unlink(self, path: str) -> None:
        self._tables.unlink(path)

    @override
    def mark(self, path: str, info: PoolInfo) -> None:
        self._tables.mark(path, info)

    def is_made_here(self, pool: PagePool) -> bool:
        return _Incarnation(pool.path, pool.info.incarnation) in self._made

    def take(self, path: str, info: PoolInfo) -> DevicePages:
        """Opens the pages once; each call needs one `give_back`. Raises DeviceHandleInvalid, DeviceUnavailable."""
        incarnation = _Incarnation(path, info.incarnation)
        opened = self._opened.get(incarnation)
        if opened is None:
            device = cuda_ordinal(info.device)
            if len(info.ipc_handle) != HANDLE_BYTES:
                raise DeviceHandleInvalid(f"the header of {path} has no handle for its pages on {info.device}")
            opened = DevicePages(device, self.memory.open(device, info.ipc_handle), info.pages_bytes), 0
        pages, num_uses = opened
        self._opened[incarnation] = pages, num_uses + 1
        return pages

    def give_back(self, path: str, info: PoolInfo) -> None:
        incarnation = _Incarnation(path, info.incarnation)
        pages, num_uses = self._opened[incarnation]
        if num_uses > 1:
            self._opened[incarnation] = pages, num_uses - 1
            return
        del self._opened[incarnation]
        self.memory.close(pages.device, pages.pointer)

    def made_pages(self, path: str, info: PoolInfo) -> DevicePages:
        pages = self._made.get(_Incarnation(path, info.incarnation))
        if pages is None:
            raise PoolClosed(f"the pages of {path} were freed by its owner, which is this process")
        return pages


class _Use:
    """One mapping's use of pages. A process must not open a handle that it exported: it uses its own pages directly."""

    def __init__(self, host: CudaHost, pool: PagePool) -> None:
        self._host = host
        self._path = pool.path
        self._info = pool.info
        self._is_own = host.is_made_here(pool)
        self._pages: DevicePages | None = None

    def pages(self) -> DevicePages:
        if self._is_own:
            return self._host.made_pages(self._path, self._info)
        if self._pages is None:
            self._pages = self._host.take(self._path, self._info)
        return self._pages

    def close(self) -> None:
        if self._pages is not None:
            self._pages = None
            self._host.give_back(self._path, self._info)
