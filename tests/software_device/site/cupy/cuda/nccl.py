"""`cupy.cuda.nccl` between processes that share `$SOFTWARE_DEVICE`: what one sends, the other finds in a file.

As in NCCL, a communicator is made when all its ranks have come, an operation waits in its stream for its counterpart,
for ever, and only `abort` ends the wait.
"""

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any, Self

import numpy as np

from cupy.cuda import runtime

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
ID_BYTES = 128

available = 1
_SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
_TYPES = {6: np.float16, 7: np.float32, 8: np.float64}
_DIRECTORY = Path(os.environ["SOFTWARE_DEVICE"])
_group = threading.local()


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"software device: NCCL error {status}")


class _Aborted(Exception):
    """The wait was aborted."""


def get_version() -> int:
    return 22907


def get_build_version() -> int:
    return get_version()


def get_unique_id() -> bytes:
    return os.urandom(ID_BYTES)


def groupStart() -> None:
    _group.depth = getattr(_group, "depth", 0) + 1
    _group.held = getattr(_group, "held", [])


def groupEnd() -> None:
    """Begin what was held back: all sends, then all receives, so that none waits for another one of the group."""
    _group.depth -= 1
    if _group.depth == 0:
        held, _group.held = _group.held, []
        for is_sending, begin in sorted(held, key=lambda one: not one[0]):
            del is_sending
            begin()


class NcclCommunicator:
    """One rank of `ndev`. Like CuPy's, it can be aborted before it is initialised."""

    def __new__(cls, *_arguments: object) -> Self:
        communicator = super().__new__(cls)
        communicator._aborted = threading.Event()
        return communicator

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        if len(commId) != ID_BYTES:
            raise NcclError(4)
        self._size, self._rank = ndev, rank
        self._counts: dict[tuple[int, int], int] = {}
        self._meeting = _DIRECTORY / f"nccl-{commId.hex()[:32]}"
        self._meeting.mkdir(exist_ok=True)
        (self._meeting / f"rank-{rank}").touch(exist_ok=False)
        try:
            self._wait(lambda: all((self._meeting / f"rank-{one}").exists() for one in range(ndev)))
        except _Aborted:
            raise NcclError(6) from None

    def size(self) -> int:
        return self._size

    def rank_id(self) -> int:
        return self._rank

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._begin(stream, lambda: self._put(peer, ctypes.string_at(sendbuf, count * _SIZES[datatype])), sends=True)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._begin(stream, lambda: self._take_into(recvbuf, count * _SIZES[datatype], peer), sends=False)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        if op != NCCL_SUM:
            raise NcclError(4)

        def work() -> None:
            parts = self._exchange(ctypes.string_at(sendbuf, count * _SIZES[datatype]))
            total = sum((_numbers(part, datatype) for part in parts[1:]), start=_numbers(parts[0], datatype))
            data = _bytes(total, datatype)
            ctypes.memmove(recvbuf, data, len(data))

        self._begin(stream, work, sends=True)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        def work() -> None:
            data = b"".join(self._exchange(ctypes.string_at(sendbuf, count * _SIZES[datatype])))
            ctypes.memmove(recvbuf, data, len(data))

        self._begin(stream, work, sends=True)

    def check_async_error(self) -> None:
        if self._aborted.is_set():
            raise NcclError(6)

    def abort(self) -> None:
        self._aborted.set()

    def destroy(self) -> None:
        self._aborted.set()

    def _begin(self, stream: int, work: Any, *, sends: bool) -> None:
        def guarded() -> None:
            try:
                work()
            except _Aborted:
                return

        def begin() -> None:
            runtime.streams[stream].put(guarded)

        if getattr(_group, "depth", 0):
            _group.held.append((sends, begin))
        else:
            begin()

    def _exchange(self, data: bytes) -> list[bytes]:
        """What every rank has given, in the order of ranks."""
        for peer in range(self._size):
            if peer != self._rank:
                self._put(peer, data)
        return [data if peer == self._rank else self._take(peer) for peer in range(self._size)]

    def _path(self, source: int, target: int) -> Path:
        number = self._counts[source, target] = self._counts.get((source, target), 0) + 1
        return self._meeting / f"{source}-{target}-{number}"

    def _put(self, peer: int, data: bytes) -> None:
        path = self._path(self._rank, peer)
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(data)
        unfinished.rename(path)

    def _take(self, peer: int) -> bytes:
        path = self._path(peer, self._rank)
        self._wait(path.exists)
        data = path.read_bytes()
        path.unlink()
        return data

    def _take_into(self, pointer: int, num_bytes: int, peer: int) -> None:
        data = self._take(peer)
        if len(data) != num_bytes:
            raise NcclError(5)
        ctypes.memmove(pointer, data, num_bytes)

    def _wait(self, condition: Any) -> None:
        while not condition():
            if self._aborted.is_set():
                raise _Aborted
            # Another process changes it, and the file system sends no notice.
            time.sleep(0.0002)


def _numbers(data: bytes, datatype: int) -> Any:
    if datatype == NCCL_BFLOAT16:
        return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype=_TYPES[datatype])


def _bytes(numbers: Any, datatype: int) -> bytes:
    if datatype == NCCL_BFLOAT16:
        bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return (rounded >> 16).astype(np.uint16).tobytes()
    return numbers.astype(_TYPES[datatype]).tobytes()
