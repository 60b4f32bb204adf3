"""Moves bytes between a pool and one connection: directly for host memory, through page-locked buffers for devices.

A device's bytes go through two buffers in turn: while one is on the connection, the other is on its way between host
and device, in its own stream. Used by the threads of `tcp/link.py`, each of which has a `Copier` to itself; all
calls block.
"""

import contextlib
import socket
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from kvstore.errors import DeviceError, TransferError
from kvstore.pool.cuda.memory import CopyMark, CopyRange, DeviceMemory, HostBuffer
from kvstore.pool.device import DevicePages
from kvstore.transfer.paired.link import Memory
from kvstore.transfer.paired.tcp.wire import Part, num_bytes_of

_WAIT_ALL = getattr(socket, "MSG_WAITALL", 0)


class Copier(Protocol):
    """Moves the chunks of one transfer between a pool and a connection."""

    def send(self, connection: socket.socket, memory: Memory, chunks: Sequence[Sequence[Part]]) -> None:
        """Read pages, send them. Raises OSError, TransferError, DeviceError."""
        ...

    def receive(self, connection: socket.socket, memory: Memory, chunks: Sequence[Sequence[Part]]) -> None:
        """Receive pages; they are written when this returns. Raises OSError, TransferError, DeviceError."""
        ...

    def close(self) -> None:
        """Free buffers, once no copy uses them any more."""
        ...


class HostCopier(Copier):
    """`Copier` for pools in host memory: the kernel copies between socket and pages."""

    @override
    def send(self, connection: socket.socket, memory: Memory, chunks: Sequence[Sequence[Part]]) -> None:
        for chunk in chunks:
            send_all(connection, _views(memory, chunk))

    @override
    def receive(self, connection: socket.socket, memory: Memory, chunks: Sequence[Sequence[Part]]) -> None:
        for chunk in chunks:
            receive_all(connection, _views(memory, chunk))

    @override
    def close(self) -> None:
        """It holds nothing."""


class StagedCopier(Copier):
    """`Copier` for pools on a device. Raises DeviceError."""

    def __init__(self, memory: DeviceMemory, device: int, chunk_bytes: int) -> None:
        self._memory = memory
        self._device = device
        self._stream = memory.stream(device)
        self._buffers: list[HostBuffer] = []
        self._marks: list[CopyMark | None] = [None, None]
        try:
            # Two are enough: device and connection each work on one; more would only take page-locked memory.
            for _ in range(2):
                self._buffers.append(memory.allocate_host(device, chunk_bytes))
        except BaseException:
            # The first buffer stays page-locked otherwise: there is no object yet whose `close` would free it.
            self.close()
            raise

    @override
    def send(self, connection: socket.socket, memory: Memory, chunks: Sequence[Sequence[Part]]) -> None:
        """The device is one chunk ahead of the connection."""
        for number, chunk in enumerate(chunks):
            self._begin(number % 2, memory, chunk, is_reading=True)
            if number:
                self._push(connection, (number - 1) % 2, chunks[number - 1])
        if chunks:
            self._push(connection, (len(chunks) - 1) % 2, chunks[-1])

    @override
    def receive(self, connection: socket.socket, memory: Memory, chunks: Sequence[Sequence[Part]]) -> None:
        """The connection is one chunk ahead of the device."""
        for number, chunk in enumerate(chunks):
            slot = number % 2
            self._settle(slot)
            receive_all(connection, [self._buffers[slot].view[: num_bytes_of([chunk])]])
            self._begin(slot, memory, chunk, is_reading=False)
        for slot in range(2):
            self._settle(slot)

    @override
    def close(self) -> None:
        for slot in range(2):
            # A device that failed runs nothing any more.
            with contextlib.suppress(DeviceError):
                self._settle(slot)
        for buffer in self._buffers:
            with contextlib.suppress(DeviceError):
                self._memory.free_host(self._device, buffer)
        self._buffers.clear()

    def _begin(self, slot: int, memory: Memory, chunk: Sequence[Part], *, is_reading: bool) -> None:
        """Begin the copies between a buffer, from its beginning, and the parts of a chunk."""
        assert isinstance(memory, DevicePages)
        at, ranges = self._buffers[slot].pointer, list[CopyRange]()
        for offset, size in chunk:
            page = memory.pointer + offset
            ranges.append(CopyRange(at, page, size) if is_reading else CopyRange(page, at, size))
            at += size
        self._marks[slot] = self._stream.copy(ranges)

    def _push(self, connection: socket.socket, slot: int, chunk: Sequence[Part]) -> None:
        self._settle(slot)
        send_all(connection, [self._buffers[slot].view[: num_bytes_of([chunk])]])

    def _settle(self, slot: int) -> None:
        mark, self._marks[slot] = self._marks[slot], None
        if mark is not None:
            mark.wait()


def send_all(connection: socket.socket, views: list[memoryview]) -> None:
    """Send views one after another, gathered by the kernel. Consumes the list. Raises OSError."""
    while views:
        _consume(views, connection.sendmsg(views))


def receive_all(connection: socket.socket, views: list[memoryview]) -> None:
    """Fill views one after another. Consumes the list. Raises OSError, also if the other end has closed."""
    while views:
        count = connection.recvmsg_into(views, 0, _WAIT_ALL)[0]
        if not count:
            raise ConnectionResetError("the other end closed the connection in the middle of a transfer")
        _consume(views, count)


def _consume(views: list[memoryview], count: int) -> None:
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    del views[:done]
    if count:
        # Sockets take as much as fits: after a short write, the rest of that piece goes first.
        views[0] = views[0][count:]


def _views(memory: Memory, chunk: Sequence[Part]) -> list[memoryview]:
    assert isinstance(memory, memoryview)
    try:
        return [memory[offset : offset + size] for offset, size in chunk]
    except ValueError:
        # The view was released: its pool was closed under the transfer.
        raise TransferError("pool_closed", "a pool was closed while its pages were being copied") from None
