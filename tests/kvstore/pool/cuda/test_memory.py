"""The wrapper of CuPy, over a stand-in for its module: which calls it makes, and what becomes of CUDA's errors."""

import ctypes
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import DeviceExhaustedMemory, DeviceFault, DeviceHandleInvalid, DeviceUnavailable
from kvstore.pool.cuda import memory as cuda_memory
from kvstore.pool.cuda.gather import PIECE_BYTES, table_of
from kvstore.pool.cuda.memory import CopyRange, CupyMemory, DeviceMemory, load_cupy_memory
from tests.kvstore.fake_devices import CUDARuntimeError

MIB = 1 << 20


NOTHING = ("setDevice", "deviceSynchronize", "free", "memset", "ipcCloseMemHandle", "memcpyAsync", "freeHost")
RESULTS = {**dict.fromkeys(NOTHING), "malloc": 0x7000, "ipcGetMemHandle": bytes(64), "ipcOpenMemHandle": 0x9000}
"""What functions of the runtime return."""


class Runtime:
    """What CuPy 14.2 calls the CUDA runtime's functions, and what it gives them. `fails` makes a function fail."""

    CUDARuntimeError = CUDARuntimeError
    memcpyDefault = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        self.event_status = 0
        self.launch_status = 0

    def call(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        if name in self.fails:
            raise CUDARuntimeError(self.fails[name])
        return RESULTS.get(name)

    def __getattr__(self, name: str) -> Any:
        if name not in RESULTS:
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    def memGetInfo(self) -> tuple[int, int]:
        return 3 * MIB, 80 * MIB

    def hostAlloc(self, size: int, flags: int) -> int:
        self.call("hostAlloc", size, flags)
        self.host = ctypes.create_string_buffer(size)
        return ctypes.addressof(self.host)

    def eventQuery(self, event: int) -> int:
        return self.event_status


class Stream:
    ptr = 77

    def __init__(self, runtime: Runtime, non_blocking: bool) -> None:
        assert non_blocking
        self._runtime = runtime

    def record(self, event: "Event") -> None:
        self._runtime.call("record", event.ptr, self.ptr)

    def synchronize(self) -> None:
        self._runtime.call("streamSynchronize", self.ptr)

    def __enter__(self) -> None:
        self._runtime.call("stream current", self.ptr)

    def __exit__(self, *_: object) -> None:
        self._runtime.call("stream left")


class Driver:
    class CUDADriverError(CUDARuntimeError):
        pass


class Compiler:
    class CompileException(Exception):
        pass


class Event:
    ptr = 88

    def __init__(self, runtime: Runtime, disable_timing: bool) -> None:
        assert disable_timing
        self._runtime = runtime

    def synchronize(self) -> None:
        self._runtime.call("eventSynchronize", self.ptr)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def memory(runtime: Runtime) -> DeviceMemory:
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=Driver,
        compiler=Compiler,
        Stream=lambda non_blocking: Stream(runtime, non_blocking),
        Event=lambda disable_timing: Event(runtime, disable_timing),
    )

    class RawKernel:
        """As of CuPy 14.2."""

        def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
            assert f"void {name}(" in code
            assert all(option.startswith("-") for option in options)

        def compile(self) -> None:
            runtime.call("compile")

        def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[int, ...]) -> None:
            runtime.call("launch", grid, block, args)
            if runtime.launch_status:
                raise Driver.CUDADriverError(runtime.launch_status)

    return CupyMemory(SimpleNamespace(cuda=cuda, RawKernel=RawKernel, uint64=int))


def test_an_allocation_is_of_whole_granules_and_zeroed_before_anybody_sees_it(
    runtime: Runtime, memory: DeviceMemory
) -> None:
    assert memory.allocate(1, 2 * MIB + 1) == 0x7000
    assert memory.export(1, 0x7000) == bytes(64)
    memory.free(1, 0x7000)
    assert runtime.calls == [
        ("setDevice", 1),
        ("malloc", 4 * MIB),
        ("memset", 0x7000, 0, 4 * MIB),
        ("deviceSynchronize",),
        ("setDevice", 1),
        ("ipcGetMemHandle", 0x7000),
        ("setDevice", 1),
        ("free", 0x7000),
    ]


def test_too_little_memory_is_said_in_figures(runtime: Runtime, memory: DeviceMemory) -> None:
    runtime.fails["malloc"] = 2
    with pytest.raises(DeviceExhaustedMemory, match="cuda:0 has 3145728 of its 83886080 bytes free") as caught:
        memory.allocate(0, 5 * MIB)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (6 * MIB, 3 * MIB)
    assert memory.usage(0) == (3 * MIB, 80 * MIB)


def test_memory_that_cannot_be_zeroed_is_freed(runtime: Runtime, memory: DeviceMemory) -> None:
    runtime.fails["memset"] = 1
    with pytest.raises(DeviceFault):
        memory.allocate(0, 1)
    assert runtime.calls[-1] == ("free", 0x7000)


def test_handles_are_opened_and_closed(runtime: Runtime, memory: DeviceMemory) -> None:
    assert memory.open(1, b"h" * 64) == 0x9000
    memory.close(1, 0x9000)
    assert runtime.calls == [
        ("setDevice", 1),
        ("ipcOpenMemHandle", b"h" * 64, 1),
        ("setDevice", 1),
        ("ipcCloseMemHandle", 0x9000),
    ]
    with pytest.raises(DeviceHandleInvalid, match="this one has 3"):
        memory.open(1, b"abc")
    runtime.fails["ipcOpenMemHandle"] = 1
    with pytest.raises(DeviceHandleInvalid, match="opening another process's memory on cuda:1 failed: cudaError1"):
        memory.open(1, b"h" * 64)


def test_copies_are_followed_by_their_mark(runtime: Runtime, memory: DeviceMemory) -> None:
    stream = memory.stream(0)
    mark = stream.copy([CopyRange(10, 20, 5), CopyRange(30, 40, 6)])
    assert runtime.calls[-4:] == [
        ("setDevice", 0),
        ("memcpyAsync", 10, 20, 5, 4, 77),
        ("memcpyAsync", 30, 40, 6, 4, 77),
        ("record", 88, 77),
    ]
    runtime.event_status = 600
    assert not mark.is_done()
    runtime.event_status = 0
    assert mark.is_done()
    mark.wait()
    assert runtime.calls[-1] == ("eventSynchronize", 88)
    runtime.event_status = 700
    with pytest.raises(DeviceFault, match="has to be replaced"):
        mark.is_done()


def test_scattered_copies_are_one_launch_behind_their_table(runtime: Runtime, memory: DeviceMemory) -> None:
    stream = memory.stream(1, gathers=True)
    assert [call[0] for call in runtime.calls] == ["setDevice", "compile", "setDevice", "hostAlloc", "malloc"]
    runtime.calls.clear()
    ranges = [CopyRange(0x100, 0x900, 40), CopyRange(0x200, 0xA00, PIECE_BYTES + 1)]
    mark = stream.gather(ranges)
    table = table_of(ranges)
    start = ctypes.addressof(runtime.host)
    assert runtime.calls == [
        ("setDevice", 1),
        ("memcpyAsync", 0x7000, start, len(table.data), 4, 77),
        ("stream current", 77),
        ("launch", (3,), (256,), (0x7000, 2, 3)),
        ("stream left",),
        ("record", 88, 77),
    ]
    assert runtime.host.raw[: len(table.data)] == table.data
    assert mark.is_done()


def test_a_table_is_not_written_while_a_kernel_may_read_it(runtime: Runtime, memory: DeviceMemory) -> None:
    stream = memory.stream(0, gathers=True)
    runtime.event_status = 600
    for _ in range(8):
        stream.gather([CopyRange(1, 2, 3)])
    tables = {call[1] for call in runtime.calls if call[0] == "memcpyAsync"}
    assert len(tables) == 8
    runtime.calls.clear()
    assert not stream.can_gather()
    runtime.event_status = 0
    assert stream.can_gather()
    stream.gather([CopyRange(1, 2, 3)])
    assert "launch" in [call[0] for call in runtime.calls]


def test_a_kernel_that_cannot_be_compiled_or_launched(runtime: Runtime, memory: DeviceMemory) -> None:
    stream = memory.stream(0, gathers=True)
    runtime.launch_status = 719
    with pytest.raises(DeviceFault, match="copying pages on cuda:0 failed"):
        stream.gather([CopyRange(1, 2, 3)])
    assert runtime.calls[-1] == ("streamSynchronize", 77)
    runtime.fails["compile"] = 999
    with pytest.raises(DeviceUnavailable, match="gather_from = 0"):
        memory.stream(0, gathers=True)
    memory.stream(0)


def test_page_locked_memory_can_be_written_and_is_given_back(runtime: Runtime, memory: DeviceMemory) -> None:
    buffer = memory.allocate_host(1, 100)
    buffer.view[:4] = b"abcd"
    assert runtime.host.raw[:4] == b"abcd"
    memory.free_host(1, buffer)
    assert runtime.calls[-1] == ("freeHost", buffer.pointer)
    with pytest.raises(ValueError, match="released"):
        buffer.view[0]


def test_copies_that_fail_to_begin_are_not_left_running(runtime: Runtime, memory: DeviceMemory) -> None:
    stream = memory.stream(0)
    runtime.fails["record"] = 1
    with pytest.raises(DeviceFault, match="copying pages on cuda:0"):
        stream.copy([CopyRange(10, 20, 5)])
    assert runtime.calls[-1] == ("streamSynchronize", 77)


@pytest.mark.parametrize("status", [3, 35, 46, 100, 101, 802, 803])
def test_what_says_that_there_is_no_device(runtime: Runtime, memory: DeviceMemory, status: int) -> None:
    runtime.fails["setDevice"] = status
    for use in (lambda: memory.usage(0), lambda: memory.open(0, bytes(64)), lambda: memory.stream(0)):
        with pytest.raises(DeviceUnavailable, match="see nvidia-smi") as caught:
            use()
        assert ("forked" in caught.value.message) == (status == 3)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cuda_memory, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(DeviceUnavailable, match=r"install kvmesh\[cuda13\]"):
        load_cupy_memory()
    assert importlib.import_module("json")
