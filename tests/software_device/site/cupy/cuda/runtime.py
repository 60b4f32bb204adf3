"""`cupy.cuda.runtime`: memory as files in `$SOFTWARE_DEVICE`, an allocation each; a process that maps one locks it.

A file is memory in use as long as any process holds its lock, so what dead processes had is free again, and what a
process still maps is not, whichever process made it.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)

events: dict[int, Any] = {}
streams: dict[int, Any] = {}

_DIRECTORY = Path(os.environ["SOFTWARE_DEVICE"])
TOTAL_BYTES = int(os.environ.get("SOFTWARE_DEVICE_BYTES", 1 << 30))
NUM_DEVICES = int(os.environ.get("SOFTWARE_DEVICES", "1"))
_OUT_OF_MEMORY, _INITIALIZATION, _INVALID_VALUE, _INVALID_DEVICE, _INVALID_HANDLE, _NOT_READY = 2, 3, 1, 101, 400, 600


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"software device: error {status}")


class _Mapping(NamedTuple):
    memory: mmap.mmap
    descriptor: int
    name: str
    is_own: bool


_mappings: dict[int, _Mapping] = {}
_host_buffers: dict[int, Any] = {}
_current = [0]
_used_by: list[int] = []


def _begin() -> None:
    if not _used_by:
        _used_by.append(os.getpid())
    if _used_by[0] != os.getpid():
        raise CUDARuntimeError(_INITIALIZATION)


def getDeviceCount() -> int:
    _begin()
    return NUM_DEVICES


def setDevice(device: int) -> None:
    _begin()
    if not 0 <= device < NUM_DEVICES:
        raise CUDARuntimeError(_INVALID_DEVICE)
    _current[0] = device


def getDevice() -> int:
    return _current[0]


def deviceSynchronize() -> None:
    _begin()


def memGetInfo() -> tuple[int, int]:
    _begin()
    with accounts():
        return TOTAL_BYTES - taken(_current[0]), TOTAL_BYTES


def malloc(size: int) -> int:
    _begin()
    device = _current[0]
    with accounts():
        if size > TOTAL_BYTES - taken(device):
            raise CUDARuntimeError(_OUT_OF_MEMORY)
        name = f"{device}-{uuid.uuid4().hex}"
        descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        os.ftruncate(descriptor, size)
        return _map(name, descriptor, is_own=True)


def free(pointer: int) -> None:
    _unmap(pointer, is_own=True)


def hostAlloc(size: int, flags: int) -> int:
    _begin()
    buffer = ctypes.create_string_buffer(size)
    _host_buffers[ctypes.addressof(buffer)] = buffer
    return ctypes.addressof(buffer)


def freeHost(pointer: int) -> None:
    if _host_buffers.pop(pointer, None) is None:
        raise CUDARuntimeError(_INVALID_VALUE)


def memset(pointer: int, value: int, size: int) -> None:
    ctypes.memset(pointer, value, size)


def memcpy(destination: int, source: int, size: int, kind: int) -> None:
    ctypes.memmove(destination, source, size)


def memcpyAsync(destination: int, source: int, size: int, kind: int, stream: int) -> None:
    _begin()
    streams[stream].put(lambda: ctypes.memmove(destination, source, size))


def ipcGetMemHandle(pointer: int) -> bytes:
    mapping = _mappings.get(pointer)
    if mapping is None or not mapping.is_own:
        raise CUDARuntimeError(_INVALID_VALUE)
    return mapping.name.encode().ljust(64, b"\0")


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:
    _begin()
    name = handle.rstrip(b"\0").decode()
    if any(mapping.is_own and mapping.name == name for mapping in _mappings.values()):
        raise CUDARuntimeError(_INVALID_VALUE)
    try:
        descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        raise CUDARuntimeError(_INVALID_HANDLE) from None
    return _map(name, descriptor, is_own=False)


def ipcCloseMemHandle(pointer: int) -> None:
    _unmap(pointer, is_own=False)


def eventQuery(event: int) -> int:
    return 0 if events[event].done else _NOT_READY


def _map(name: str, descriptor: int, *, is_own: bool) -> int:
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    memory = mmap.mmap(descriptor, 0)
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _mappings[pointer] = _Mapping(memory, descriptor, name, is_own)
    return pointer


def _unmap(pointer: int, *, is_own: bool) -> None:
    mapping = _mappings.get(pointer)
    if mapping is None or mapping.is_own is not is_own:
        raise CUDARuntimeError(_INVALID_VALUE)
    del _mappings[pointer]
    os.close(mapping.descriptor)
    # The interpreter counts the address that was taken as a use of the mapping, which goes when nothing refers to it.
    with contextlib.suppress(BufferError):
        mapping.memory.close()


@contextlib.contextmanager
def accounts() -> Generator[None, None, None]:
    """One process at a time counts what is taken."""
    descriptor = os.open(_DIRECTORY / "accounts", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def taken(device: int) -> int:
    total = 0
    for path in _DIRECTORY.glob(f"{device}-*"):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                total += os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    return total
