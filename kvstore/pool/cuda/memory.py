"""Memory of CUDA devices: allocating what other processes can open, opening what they made, copying between the two.

`DeviceMemory` is the seam; `load_cupy_memory` makes the one implementation, over CuPy's bindings of the CUDA runtime.
CuPy is imported only when device memory is first used: a process that never uses any needs neither CuPy nor a driver.
Used by `pool.py`, `kvstore/transfer/mapped/cuda_ipc.py` and `kvstore/transfer/paired/tcp/staging.py`.

A process that was forked after its parent used CUDA cannot use it; processes that use this module are spawned. Calls
may come from any thread: the current device belongs to the thread, so each call sets it. A stream is used by one
thread.
"""

import contextlib
import ctypes
import importlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from typing_extensions import override

from kvstore.errors import DeviceError, DeviceExhaustedMemory, DeviceFault, DeviceHandleInvalid, DeviceUnavailable
from kvstore.pool.cuda.gather import MAX_TABLE_BYTES, GatherKernel, table_of

# CUDA_IPC_HANDLE_SIZE of driver_types.h.
HANDLE_BYTES: Final = 64

# cudaMalloc cuts small allocations out of blocks of 2 MiB, and a handle always names the whole block: an allocation of
# whole blocks begins where its handle's allocation begins.
_GRANULE_BYTES: Final = 2 << 20

# cudaError_t; CuPy does not name these.
_MEMORY_ALLOCATION: Final = 2
_INITIALIZATION: Final = 3
_NOT_READY: Final = 600
_UNAVAILABLE: Final = frozenset({_INITIALIZATION, 35, 46, 100, 101, 802, 803})
_FIRST_FAULT: Final = 700

_LAZY_ENABLE_PEER_ACCESS: Final = 1
_HOST_ALLOC_PORTABLE: Final = 1
# Kernels in a stream at a time, each with up to 2,048 copies.
_NUM_TABLES: Final = 8


class CopyRange(NamedTuple):
    """Bytes to copy between two addresses of this process: on devices, or in page-locked host memory."""

    destination: int
    source: int
    num_bytes: int


class HostBuffer(NamedTuple):
    """Page-locked memory of this process: copies between it and a device run in parallel with everything else."""

    pointer: int
    view: memoryview


class CopyMark(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Whether everything put into the stream before this point has ended. Raises DeviceFault."""
        ...

    def wait(self) -> None:
        """Block until it has ended. Raises DeviceFault."""
        ...


class CopyStream(Protocol):
    """A queue of copies that waits for nothing else on the device."""

    def copy(self, ranges: Sequence[CopyRange]) -> CopyMark:
        """Begin copies between device memories. Raises DeviceFault; then none of the copies is still running."""
        ...

    def can_gather(self) -> bool:
        """Whether one of the stream's tables is free for `gather`; it was made with `gathers`. Raises DeviceFault."""
        ...

    def gather(self, ranges: Sequence[tuple[int, int, int]], destination: int = 0, source: int = 0) -> CopyMark:
        """Like `copy`, by one kernel, for up to `gather.MAX_RANGES` ranges within the stream's device.

        Their addresses count from `destination` and `source`.
        """
        ...


class DeviceMemory(Protocol):
    """Memory of the CUDA devices that this process sees. Devices are named by their ordinal."""

    def usage(self, device: int) -> tuple[int, int]:
        """Free bytes and total bytes. Raises DeviceUnavailable."""
        ...

    def allocate(self, device: int, num_bytes: int) -> int:
        """The address of a separate, zeroed allocation to export. Raises DeviceExhaustedMemory, DeviceUnavailable."""
        ...

    def free(self, device: int, pointer: int) -> None:
        """Free an allocation. Nothing may still use it, in any process."""
        ...

    def export(self, device: int, pointer: int) -> bytes:
        """The 64-byte handle by which another process of this host opens an allocation. Raises DeviceFault."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """The address here of another process's allocation. Raises DeviceHandleInvalid, DeviceUnavailable."""
        ...

    def close(self, device: int, pointer: int) -> None:
        """Close what `open` returned. No copy may still use it."""
        ...

    def allocate_host(self, device: int, num_bytes: int) -> HostBuffer:
        """Page-locked host memory for copies to and from a device. Raises DeviceFault, DeviceUnavailable."""
        ...

    def free_host(self, device: int, buffer: HostBuffer) -> None:
        """Free it. No copy may still use it, and nobody its view."""
        ...

    def stream(self, device: int, *, gathers: bool = False) -> CopyStream:
        """A stream for destinations on `device`; `gathers` compiles its kernel now. Raises DeviceUnavailable."""
        ...


def load_cupy_memory() -> DeviceMemory:
    """Device memory through CuPy. Raises DeviceUnavailable if CuPy is missing or cannot be loaded."""
    return CupyMemory(_cupy())


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceUnavailable(
            f"CuPy cannot be imported ({error}): install kvmesh[cuda13], or kvmesh[cuda12] for a CUDA 12 driver"
        ) from None


class CupyMemory(DeviceMemory):
    """Device memory through CuPy's bindings of the CUDA runtime; `cupy` is the module."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.runtime = cupy.cuda.runtime

    @override
    def usage(self, device: int) -> tuple[int, int]:
        with self.on(device, "querying free memory"):
            free_bytes, total_bytes = self.runtime.memGetInfo()
        return int(free_bytes), int(total_bytes)

    @override
    def allocate(self, device: int, num_bytes: int) -> int:
        """Allocates whole blocks of 2 MiB; not from CuPy's memory pool, whose handles name other arrays too."""
        size = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        with self.on(device, f"allocating {size} bytes"):
            try:
                pointer = int(self.runtime.malloc(size))
            except self.runtime.CUDARuntimeError as error:
                # Only lack of memory is reported with figures; any other error is reported as it is.
                if error.status != _MEMORY_ALLOCATION:
                    raise
                free_bytes, total_bytes = self.runtime.memGetInfo()
                raise DeviceExhaustedMemory(f"cuda:{device}", size, int(free_bytes), int(total_bytes)) from None
            try:
                self.runtime.memset(pointer, 0, size)
                # `memset` only queues the zeros: another process that opens the handle waits for no stream of this one.
                self.runtime.deviceSynchronize()
            except BaseException:
                # Also if interrupted: nobody else knows this address, and device memory is not freed with the object.
                self.runtime.free(pointer)
                raise
        return pointer

    @override
    def free(self, device: int, pointer: int) -> None:
        with self.on(device, "freeing memory"):
            self.runtime.free(pointer)

    @override
    def export(self, device: int, pointer: int) -> bytes:
        with self.on(device, "exporting memory"):
            return bytes(self.runtime.ipcGetMemHandle(pointer))

    @override
    def open(self, device: int, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise DeviceHandleInvalid(f"a handle of device memory has {HANDLE_BYTES} bytes, this one has {len(handle)}")
        with self.on(device, "opening another process's memory", DeviceHandleInvalid):
            return int(self.runtime.ipcOpenMemHandle(handle, _LAZY_ENABLE_PEER_ACCESS))

    @override
    def close(self, device: int, pointer: int) -> None:
        with self.on(device, "closing another process's memory"):
            self.runtime.ipcCloseMemHandle(pointer)

    @override
    def allocate_host(self, device: int, num_bytes: int) -> HostBuffer:
        """Portable: copies of any device may use it."""
        with self.on(device, f"allocating {num_bytes} bytes of page-locked host memory"):
            pointer = int(self.runtime.hostAlloc(num_bytes, _HOST_ALLOC_PORTABLE))
        return HostBuffer(pointer, memoryview((ctypes.c_ubyte * num_bytes).from_address(pointer)).cast("B"))

    @override
    def free_host(self, device: int, buffer: HostBuffer) -> None:
        buffer.view.release()
        with self.on(device, "freeing page-locked host memory"):
            self.runtime.freeHost(buffer.pointer)

    @override
    def stream(self, device: int, *, gathers: bool = False) -> "_CupyStream":
        """Non-blocking: it and the legacy default stream do not wait for each other."""
        with self.on(device, "creating a stream"):
            stream = self.cupy.cuda.Stream(non_blocking=True)
            return _CupyStream(self, device, stream, self._tables(device) if gathers else None)

    def _tables(self, device: int) -> "_Tables":
        """Compiles the kernel for the current device, `device`."""
        try:
            kernel = GatherKernel(self.cupy)
        except (RuntimeError, ImportError, OSError, self.cupy.cuda.compiler.CompileException) as error:
            raise DeviceUnavailable(
                f"the kernel that copies scattered pages cannot be compiled for cuda:{device} ({error}): install NVRTC "
                "(kvmesh[cuda13] or kvmesh[cuda12]), or set [roles.kv_agent] gather_from = 0 to copy page by page"
            ) from None
        host = self.allocate_host(device, _NUM_TABLES * MAX_TABLE_BYTES)
        pointer = int(self.runtime.malloc(_NUM_TABLES * MAX_TABLE_BYTES))
        return _Tables(kernel, pointer, host)

    @contextlib.contextmanager
    def on(self, device: int, what: str, otherwise: type[DeviceError] = DeviceFault) -> Generator[None, None, None]:
        """Make `device` current for the calls inside and raise CUDA's errors as ours; `what` describes the calls.

        Errors that mean neither a missing device nor one that failed for good are raised as `otherwise`.
        """
        try:
            # At every call: the current device is per thread, and other code of the process may have set it.
            self.runtime.setDevice(device)
            yield
        except (self.runtime.CUDARuntimeError, self.cupy.cuda.driver.CUDADriverError) as error:
            # A launch is a driver call; from 100 on, the driver's codes mean the same as the runtime's.
            status = int(error.status)
            text = f"{what} on cuda:{device} failed: {error}"
            if status in _UNAVAILABLE:
                hint = "; was the process forked after its parent used CUDA?" if status == _INITIALIZATION else ""
                raise DeviceUnavailable(f"{text}{hint}; see nvidia-smi for devices and driver") from None
            # Faults stay: every later call of the process fails in the same way, so only another process helps.
            if status >= _FIRST_FAULT:
                raise DeviceFault(
                    f"{text}; this process cannot use the device any more and has to be replaced"
                ) from None
            raise otherwise(text) from None


class _Slot:
    """Room for one table, on the host and on the device; `mark` is behind the kernel that read it last."""

    def __init__(self, pointer: int, host: HostBuffer) -> None:
        self.pointer = pointer
        self.host = host
        self.mark: _CupyMark | None = None


class _Tables:
    """The kernel of a stream and its tables. They live as long as the process, like the stream."""

    def __init__(self, kernel: GatherKernel, pointer: int, host: HostBuffer) -> None:
        self.kernel = kernel
        offsets = [number * MAX_TABLE_BYTES for number in range(_NUM_TABLES)]
        self._slots = deque(
            _Slot(pointer + at, HostBuffer(host.pointer + at, host.view[at : at + MAX_TABLE_BYTES])) for at in offsets
        )

    def has_slot(self) -> bool:
        mark = self._slots[0].mark
        return mark is None or mark.is_done()

    def take_slot(self) -> _Slot:
        assert self.has_slot(), "a kernel still reads the table"
        slot = self._slots[0]
        self._slots.rotate(-1)
        return slot


class _CupyStream:
    def __init__(self, memory: CupyMemory, device: int, stream: Any, tables: _Tables | None) -> None:
        self._memory = memory
        self._device = device
        self._stream = stream
        self._tables = tables

    def copy(self, ranges: Sequence[CopyRange]) -> "_CupyMark":
        runtime, pointer = self._memory.runtime, self._stream.ptr

        def put() -> None:
            for destination, source, num_bytes in ranges:
                # `memcpyDefault`: the driver tells from the addresses whether they are of this device, another one or
                # the host.
                runtime.memcpyAsync(destination, source, num_bytes, runtime.memcpyDefault, pointer)

        return self._marked(put)

    def can_gather(self) -> bool:
        return self._gathering().has_slot()

    def gather(self, ranges: Sequence[tuple[int, int, int]], destination: int = 0, source: int = 0) -> "_CupyMark":
        # Each launch in flight has its own slot: the kernel reads the table long after this call has returned.
        tables = self._gathering()
        slot, table = tables.take_slot(), table_of(ranges, destination, source)
        runtime, size = self._memory.runtime, len(table.data)
        slot.host.view[:size] = table.data

        def put() -> None:
            runtime.memcpyAsync(slot.pointer, slot.host.pointer, size, runtime.memcpyDefault, self._stream.ptr)
            tables.kernel.launch(self._stream, slot.pointer, table)

        slot.mark = self._marked(put)
        return slot.mark

    def _gathering(self) -> _Tables:
        assert self._tables is not None, "the stream was not made for it"
        return self._tables

    def _marked(self, put: Callable[[], None]) -> "_CupyMark":
        with self._memory.on(self._device, "copying pages"):
            event = self._memory.cupy.cuda.Event(disable_timing=True)
            try:
                put()
                self._stream.record(event)
            except BaseException:
                # Without a mark nobody could tell when the copies that were begun have ended.
                self._stream.synchronize()
                raise
        return _CupyMark(self._memory, self._device, event)


class _CupyMark:
    def __init__(self, memory: CupyMemory, device: int, event: Any) -> None:
        self._memory = memory
        self._device = device
        self._event = event

    def is_done(self) -> bool:
        with self._memory.on(self._device, "checking a copy"):
            # Not `Event.done`, which cannot tell a fault from an event that never comes.
            status = int(self._memory.runtime.eventQuery(self._event.ptr))
            if status not in (0, _NOT_READY):
                raise self._memory.runtime.CUDARuntimeError(status)
        return status == 0

    def wait(self) -> None:
        with self._memory.on(self._device, "waiting for a copy"):
            self._event.synchronize()
