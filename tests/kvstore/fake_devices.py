"""Device memory over bytearrays, for tests only: strict about what CUDA leaves undefined, slow as a test wants it.

`FakeCards` are the devices of one machine, `FakeDeviceMemory` is one process that uses them. A process knows an
allocation by an address of its own, as with CUDA. Copies run when the test lets them, or when somebody looks.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import DeviceExhaustedMemory, DeviceFault, DeviceHandleInvalid, DeviceUnavailable
from kvstore.pool.cuda.gather import MAX_RANGES
from kvstore.pool.cuda.memory import HANDLE_BYTES, CopyRange, HostBuffer
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import MemoryHost, PagePool


class CUDARuntimeError(RuntimeError):
    """As CuPy's: with the `cudaError_t`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: text")
        self.status = status


class Allocation:
    def __init__(self, maker: "FakeDeviceMemory", device: int, num_bytes: int) -> None:
        self.maker = maker
        self.device = device
        self.data = bytearray(num_bytes)
        self.is_freed = False


class Mapped(NamedTuple):
    """An allocation as one process sees it; `num_opens` 0: it made it."""

    allocation: Allocation
    num_opens: int


class FakeCards:
    """`copies_per_look`: how many copies of a stream run each time a mark is looked at; None: all."""

    def __init__(self, num_devices: int = 1, num_bytes: int = 1 << 20) -> None:
        self.num_devices = num_devices
        self.num_bytes = num_bytes
        self.copies_per_look: int | None = None
        self.handles: dict[bytes, Allocation] = {}
        self.allocations: list[Allocation] = []
        self.streams: list[FakeStream] = []
        self.fault = ""

    def used(self, device: int) -> int:
        return sum(len(one.data) for one in self.allocations if one.device == device)

    @property
    def num_waiting(self) -> int:
        return sum(len(stream.waiting) for stream in self.streams)

    def run(self, num_copies: int | None = None) -> None:
        for stream in self.streams:
            stream.run(num_copies)


class FakeDeviceMemory:
    """One process; see `DeviceMemory`."""

    processes = 0

    def __init__(self, cards: FakeCards) -> None:
        FakeDeviceMemory.processes += 1
        self.cards = cards
        self.mapped: dict[int, Mapped] = {}
        self.host_buffers: list[Allocation] = []
        self.has_no_compiler = False
        self._next = FakeDeviceMemory.processes << 40

    def usage(self, device: int) -> tuple[int, int]:
        self._require(device)
        return self.cards.num_bytes - self.cards.used(device), self.cards.num_bytes

    def allocate(self, device: int, num_bytes: int) -> int:
        free_bytes, total_bytes = self.usage(device)
        if num_bytes > free_bytes:
            raise DeviceExhaustedMemory(f"cuda:{device}", num_bytes, free_bytes, total_bytes)
        allocation = Allocation(self, device, num_bytes)
        self.cards.allocations.append(allocation)
        return self._map(allocation, 0)

    def free(self, device: int, pointer: int) -> None:
        self._require(device)
        allocation, num_opens = self.mapped.pop(pointer)
        assert num_opens == 0, "what was opened is closed, not freed"
        self._require_unused(allocation)
        allocation.is_freed = True
        self.cards.allocations.remove(allocation)

    def export(self, device: int, pointer: int) -> bytes:
        self._require(device)
        allocation = self.mapped[pointer].allocation
        handle = b"handle %d" % (len(self.cards.handles) + 1)
        handle = handle.ljust(HANDLE_BYTES, b"\0")
        self.cards.handles[handle] = allocation
        return handle

    def open(self, device: int, handle: bytes) -> int:
        self._require(device)
        allocation = self.cards.handles.get(handle)
        if allocation is None or allocation.is_freed:
            raise DeviceHandleInvalid("no such allocation")
        assert allocation.maker is not self, "opening a handle in the process that exported it is undefined"
        assert allocation.device == device
        for pointer, known in self.mapped.items():
            if known.allocation is allocation:
                self.mapped[pointer] = Mapped(allocation, known.num_opens + 1)
                return pointer
        return self._map(allocation, 1)

    def close(self, device: int, pointer: int) -> None:
        self._require(device)
        allocation, num_opens = self.mapped.pop(pointer)
        assert num_opens > 0, "what was allocated is freed, not closed"
        if num_opens > 1:
            self.mapped[pointer] = Mapped(allocation, num_opens - 1)
            return
        self._require_unused(allocation)

    def allocate_host(self, device: int, num_bytes: int) -> HostBuffer:
        self._require(device)
        allocation = Allocation(self, device, num_bytes)
        self.host_buffers.append(allocation)
        return HostBuffer(self._map(allocation, 0), memoryview(allocation.data))

    def free_host(self, device: int, buffer: HostBuffer) -> None:
        allocation, _ = self.mapped.pop(buffer.pointer)
        self._require_unused(allocation)
        self.host_buffers.remove(allocation)

    def stream(self, device: int, *, gathers: bool = False) -> "FakeStream":
        self._require(device)
        if gathers and self.has_no_compiler:
            raise DeviceUnavailable("the kernel that copies scattered pages cannot be compiled")
        stream = FakeStream(self, device, gathers=gathers)
        self.cards.streams.append(stream)
        return stream

    # for tests

    def view(self, pointer: int) -> memoryview:
        return memoryview(self.mapped[pointer].allocation.data)

    @property
    def num_open(self) -> int:
        return sum(one.num_opens for one in self.mapped.values())

    def die(self) -> None:
        """kill -9: what it made is gone for good."""
        for one in self.mapped.values():
            if one.num_opens == 0:
                one.allocation.is_freed = True
                self.cards.allocations.remove(one.allocation)
        self.mapped.clear()

    def find(self, pointer: int, num_bytes: int) -> tuple[Allocation, int]:
        for base, one in self.mapped.items():
            if base <= pointer and pointer + num_bytes <= base + len(one.allocation.data):
                return one.allocation, pointer - base
        raise AssertionError(f"{num_bytes} bytes at {pointer:#x} are not mapped in this process")

    def _map(self, allocation: Allocation, num_opens: int) -> int:
        pointer = self._next
        self._next += len(allocation.data) + (1 << 21)
        self.mapped[pointer] = Mapped(allocation, num_opens)
        return pointer

    def _require(self, device: int) -> None:
        if self.cards.fault:
            raise DeviceFault(self.cards.fault)
        if not 0 <= device < self.cards.num_devices:
            raise DeviceUnavailable(f"there is no cuda:{device}")

    def _require_unused(self, allocation: Allocation) -> None:
        for stream in self.cards.streams:
            if stream.memory is self:
                for target, _, source, _, _ in stream.waiting:
                    assert allocation not in (target, source), "memory given up under a copy"


class Process:
    """A process that uses the devices, and may make and open pools there."""

    def __init__(self, tables: MemoryHost, cards: FakeCards) -> None:
        self.num_loads = 0
        self.memory = FakeDeviceMemory(cards)
        self.host = CudaHost(tables, self._load)

    def _load(self) -> FakeDeviceMemory:
        self.num_loads += 1
        return self.memory

    def bytes_of(self, pool: PagePool) -> memoryview:
        return pool.pages_view if pool.info.device == CPU else self.memory.view(pool.device_pages.pointer)


class FakeStream:
    def __init__(self, memory: FakeDeviceMemory, device: int, *, gathers: bool) -> None:
        self.memory = memory
        self.device = device
        self.gathers = gathers
        self.num_launches = 0
        self.has_tables = True
        self.waiting: deque[tuple[Allocation, int, Allocation, int, int]] = deque()
        self.num_put = 0
        self.num_done = 0

    def copy(self, ranges: Sequence[CopyRange]) -> "FakeMark":
        if self.memory.cards.fault:
            raise DeviceFault(self.memory.cards.fault)
        for destination, source, num_bytes in ranges:
            target, target_at = self.memory.find(destination, num_bytes)
            origin, origin_at = self.memory.find(source, num_bytes)
            assert target.maker is self.memory, "an agent writes into its own pools only"
            self.waiting.append((target, target_at, origin, origin_at, num_bytes))
        self.num_put += len(ranges)
        return FakeMark(self, self.num_put)

    def can_gather(self) -> bool:
        assert self.gathers, "the stream was not made for it"
        return self.has_tables

    def gather(self, ranges: Sequence[tuple[int, int, int]], destination: int = 0, source: int = 0) -> "FakeMark":
        assert self.can_gather(), "there is no table free"
        ranges = [CopyRange(destination + to, source + at, num_bytes) for to, at, num_bytes in ranges]
        assert 0 < len(ranges) <= MAX_RANGES
        for to, at, num_bytes in ranges:
            for pointer in (to, at):
                assert self.memory.find(pointer, num_bytes)[0].device == self.device, "a kernel reads its own device"
        self.num_launches += 1
        return self.copy(ranges)

    def run(self, num_copies: int | None = None) -> None:
        for _ in range(len(self.waiting) if num_copies is None else min(num_copies, len(self.waiting))):
            target, target_at, origin, origin_at, num_bytes = self.waiting.popleft()
            target.data[target_at : target_at + num_bytes] = origin.data[origin_at : origin_at + num_bytes]
            self.num_done += 1


class FakeMark:
    def __init__(self, stream: FakeStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def is_done(self) -> bool:
        cards = self._stream.memory.cards
        if cards.fault:
            raise DeviceFault(cards.fault)
        self._stream.run(cards.copies_per_look)
        return self._stream.num_done >= self._position

    def wait(self) -> None:
        if self._stream.memory.cards.fault:
            raise DeviceFault(self._stream.memory.cards.fault)
        self._stream.run()
