"""One half of a communicator of two ranks, on a real device: CuPy's binding of NCCL, and the threads that it needs.

Everything that may block does so in a thread. Making the communicator, which waits for the other end, has its own.
Sends and receives of all pairs of a device share one, because two communicators whose operations are started in
different orders on one device can wait for each other forever. Aborting has its own, because it must reach a
communicator on which another thread is stuck. See `link.py` for the seam.

Two ranks need two devices: NCCL refuses a second rank on one, except for a build of 2.30 or newer that is told to allow
it. So it ran on one H200 (`tests/gpu/test_nccl_one_device.py`); on two devices it has not been tried.
"""

import importlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ClassVar, Final, NamedTuple

from typing_extensions import override

from kvstore.errors import DeviceUnavailable
from kvstore.pool.device import CUDA, DevicePages, cuda_ordinal
from kvstore.transfer.paired.link import (
    Broken,
    LinkMaker,
    Memory,
    Moved,
    News,
    PairLink,
    Ready,
    Stopped,
    all_news,
)

# A pair: rank 0 receives, rank 1 sends.
_NUM_RANKS: Final = 2
_NOT_READY: Final = 600
# What cudaMalloc aligns to, so it cannot be less; its content is never read.
_SCRATCH_BYTES: Final = 256


class NcclLinks(LinkMaker):
    """Links over NCCL, a moving thread per device. It does not listen: NCCL's ends find each other by `unique_id`."""

    name: ClassVar[str] = "nccl"
    kinds: ClassVar[frozenset[str]] = frozenset({CUDA})
    # 1,024 polls that find nothing take a few milliseconds.
    eager_polls: ClassVar[int] = 1024

    def __init__(self) -> None:
        self._movers: dict[int, ThreadPoolExecutor] = {}
        # Buffers for the first exchange of each pair. Kept: freeing waits for all kernels of the device, and those of
        # other pairs may be waiting for their other ends.
        self._scratch: dict[int, int] = {}

    @override
    def unique_id(self) -> bytes:
        """128 bytes, which CuPy 13 returned as a tuple."""
        return bytes(_nccl().get_unique_id())

    @override
    def link(self, device: str, unique_id: bytes, rank: int) -> "NcclLink":
        cupy, nccl, ordinal = _import("cupy"), _nccl(), cuda_ordinal(device)
        if ordinal not in self._movers:
            try:
                cupy.cuda.runtime.setDevice(ordinal)
                self._scratch[ordinal] = int(cupy.cuda.runtime.malloc(_SCRATCH_BYTES))
            except RuntimeError as error:
                raise DeviceUnavailable(f"cuda:{ordinal} cannot be used: {error}") from None
            self._movers[ordinal] = ThreadPoolExecutor(1, thread_name_prefix=f"nccl-{ordinal}")
        return NcclLink(_Engine(cupy, nccl, self._movers[ordinal], ordinal, self._scratch[ordinal]), unique_id, rank)

    @override
    def close(self) -> None:
        for mover in self._movers.values():
            mover.shutdown(wait=False, cancel_futures=True)
        self._movers.clear()


class _Engine(NamedTuple):
    """What all halves on one device share."""

    cupy: Any
    nccl: Any
    mover: ThreadPoolExecutor
    device: int
    scratch: int


class NcclLink(PairLink):
    """One half of a pair: a communicator of two ranks, a stream, and events for what has moved."""

    def __init__(self, engine: _Engine, unique_id: bytes, rank: int) -> None:
        self._cupy, self._nccl, self._mover, self._device, self._scratch = engine
        self._runtime = self._cupy.cuda.runtime
        self._unique_id = unique_id
        self._rank = rank
        self._news: SimpleQueue[News] = SimpleQueue()
        self._marks: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._running: deque[tuple[int, Any]] = deque()
        self._is_aborted = False
        self._is_ready = False
        self._stream: Any = None
        # Created uninitialised, so that an abort can reach it while initialising blocks.
        self._communicator = self._nccl.NcclCommunicator.__new__(self._nccl.NcclCommunicator)

    @override
    def begin(self) -> None:
        threading.Thread(target=self._initialise, name=f"nccl-init-{self._device}", daemon=True).start()

    @override
    def move(self, number: int, memory: Memory, parts: Sequence[tuple[int, int]]) -> None:
        assert isinstance(memory, DevicePages)
        ranges = [(memory.pointer + offset, num_bytes) for offset, num_bytes in parts]
        self._mover.submit(self._move, number, ranges)

    @override
    def abort(self) -> None:
        self._is_aborted = True
        threading.Thread(target=self.stop, name=f"nccl-abort-{self._device}", daemon=True).start()

    @override
    def stop(self) -> None:
        """An abort ends the kernels of this communicator; the stream is empty after them."""
        self._is_aborted = True
        try:
            self._runtime.setDevice(self._device)
            self._communicator.abort()
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError as error:
            self._news.put(Broken(f"aborting failed: {error}"))
        self._news.put(Stopped())

    @override
    def news(self) -> list[News]:
        found = all_news(self._news)
        while not self._marks.empty():
            self._running.append(self._marks.get_nowait())
        try:
            found += self._moved()
            if self._is_ready and not self._is_aborted and self._running:
                self._communicator.check_async_error()
        except RuntimeError as error:
            self._running.clear()
            found.append(Broken(str(error)))
        return found

    def _moved(self) -> list[News]:
        found: list[News] = []
        if self._running:
            self._runtime.setDevice(self._device)
        while self._running:
            number, event = self._running[0]
            status = int(self._runtime.eventQuery(event.ptr))
            # In the stream's order: behind one that has not ended, no other has.
            if status == _NOT_READY:
                break
            if status:
                # Not `Event.done`, which cannot tell a fault from an event that has not come yet.
                raise self._runtime.CUDARuntimeError(status)
            self._running.popleft()
            found.append(Moved(number))
        return found

    def _initialise(self) -> None:
        try:
            self._runtime.setDevice(self._device)
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            self._communicator.__init__(_NUM_RANKS, self._unique_id, self._rank)
            self._warm()
        except RuntimeError as error:
            self._news.put(Broken(f"making the communicator failed: {error}"))
            return
        self._is_ready = True
        self._news.put(Ready())

    def _warm(self) -> None:
        """Exchange a few bytes: the first operation connects the two ends, which blocks until both have begun it."""
        self._group([(self._scratch, _SCRATCH_BYTES)])
        self._stream.synchronize()

    def _move(self, number: int, ranges: Sequence[tuple[int, int]]) -> None:
        # Queued behind others in the mover's thread, this may run after the abort, when the communicator is gone.
        if self._is_aborted:
            return
        try:
            self._runtime.setDevice(self._device)
            self._group(ranges)
            # Without timing, the device need not write a clock for the event.
            event = self._cupy.cuda.Event(disable_timing=True)
            self._stream.record(event)
        except RuntimeError as error:
            self._news.put(Broken(f"moving pages failed: {error}"))
            return
        self._marks.put((number, event))

    def _group(self, ranges: Sequence[tuple[int, int]]) -> None:
        """One group: rank 0 receives, rank 1 sends. As bytes, so that any element type is moved as it is."""
        other = 1 - self._rank
        operation = self._communicator.send if self._rank else self._communicator.recv
        self._nccl.groupStart()
        try:
            for pointer, num_bytes in ranges:
                operation(pointer, num_bytes, self._nccl.NCCL_INT8, other, self._stream.ptr)
        finally:
            # A group that was begun must be ended, or the thread's next operations would join it.
            self._nccl.groupEnd()


def _nccl() -> Any:
    module = _import("cupy.cuda.nccl")
    if not module.available:
        raise DeviceUnavailable("CuPy finds no NCCL: install nvidia-nccl-cu13 (or -cu12), as torch for CUDA does")
    return module


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DeviceUnavailable(
            f"{name} cannot be imported ({error}): install kvmesh[cuda13] or kvmesh[cuda12]"
        ) from None
