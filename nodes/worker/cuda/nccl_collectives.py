"""Collectives between CUDA devices by NCCL, through CuPy's binding: the only file of the worker that imports CuPy.

Operations are queued on torch's current stream on tensors of torch, by address, so they can be captured in CUDA graphs
like any kernel; NCCL accepts operations of one communicator inside and outside of graphs (`NCCL_GRAPH_MIXING_SUPPORT`,
on by default). A communicator's first operation connects it, which cannot be captured: each size is run before it is
captured (`GraphRecorder`), so that the algorithm chosen for it is connected.

The host waits for nothing here. If a rank is gone, the kernels of the others run for ever: the worker's deadline of a
step calls `abort`, which ends them, and kills the process; `check` then prevents a result that an abort cut short from
being reported. Making the communicator blocks until all ranks have come, so it is done in a thread that can be given
up. Communicators are aborted, never destroyed: destroying waits for the other ranks. Even an abort returns only when
the graphs that captured the communicator are freed (`commDestroySync`), after it has ended the kernels, so nobody waits
for it.

One device per rank: NCCL refuses a second rank on a device, except with `NCCL_MULTI_RANK_GPU_ENABLE=1` of version 2.30.
So two ranks ran on one H200; on two devices it has not been tried.
"""

import importlib
import os
import threading
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from kvstore.pool.device import cuda_ordinal
from nodes.worker.errors import BackendMissing, CollectiveFailed, GroupNotFormed
from nodes.worker.parallel.collectives import Collectives, CollectivesMaker

# `ncclSum` of nccl.h.
_SUM: Final = 0
_DTYPES: Final = {torch.float32: 7, torch.float16: 6, torch.bfloat16: 9}
"""`ncclDataType_t`; CuPy has no name for bfloat16, and passes the number on."""
_GRAPH_REGISTER: Final = "NCCL_GRAPH_REGISTER"


class NcclCollectivesMaker(CollectivesMaker):
    """Groups of CUDA devices. `form_timeout_s` bounds `connect`."""

    def __init__(self, form_timeout_s: float) -> None:
        self._form_timeout_s = form_timeout_s

    @override
    def unique_id(self) -> bytes:
        """The id contains an address at which a thread of NCCL waits for the other ranks."""
        try:
            return bytes(_nccl().get_unique_id())
        except RuntimeError as error:
            raise GroupNotFormed(
                f"NCCL cannot make a unique id: {error}; NCCL_DEBUG=INFO says more,"
                " NCCL_SOCKET_IFNAME sets the interface"
            ) from error

    @override
    def close(self) -> None:
        """What NCCL keeps for a unique id ends with the process."""

    @override
    def connect(self, unique_id: bytes, rank: int, size: int, device: str) -> "NcclCollectives":
        """Raises BackendMissing if there is no NCCL."""
        nccl, on = _nccl(), torch.device("cuda", cuda_ordinal(device))
        # Registered buffers would stay pinned for as long as a graph lives.
        os.environ.setdefault(_GRAPH_REGISTER, "0")
        # Made before it is initialised, so that an abort reaches it while initialising blocks.
        communicator = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
        outcome: list[Exception | None] = []

        def initialise() -> None:
            try:
                _set_device(on)
                communicator.__init__(size, unique_id, rank)
            except Exception as error:  # noqa: BLE001 # raised by the thread that waits
                outcome.append(error)
            else:
                outcome.append(None)

        # In a thread, since initialising has no timeout of its own: if a rank is missing it waits for ever.
        thread = threading.Thread(target=initialise, name="nccl-init", daemon=True)
        thread.start()
        thread.join(self._form_timeout_s)
        if not outcome:
            _in_background(communicator.abort)
            raise GroupNotFormed(
                f"rank {rank} of {size} did not find the others within {self._form_timeout_s:g} s; see why their"
                " workers ended or did not start"
            )
        if outcome[0] is not None:
            raise GroupNotFormed(
                f"rank {rank} of {size} on {on} could not join ({outcome[0]}): each rank needs a device of its own;"
                " NCCL_DEBUG=INFO says more"
            ) from outcome[0]
        return NcclCollectives(communicator, rank, size, on)


class NcclCollectives(Collectives):
    """One rank: a communicator of NCCL, used on torch's current stream."""

    def __init__(self, communicator: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._communicator = communicator
        self._device = device
        self._failure = ""
        # An abort comes from the thread of the step's deadline. Never held while NCCL waits for another rank.
        self._lock = threading.Lock()

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        """In place, where `x` is contiguous."""
        x = x.contiguous()
        address = x.data_ptr()
        self._queue(x, self._communicator.allReduce, address, address, x.numel(), _DTYPES[x.dtype], _SUM)
        return x

    @override
    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        num_rows, width = x.shape
        # Gathered by rank, then laid side by side: NCCL puts whole buffers one behind the other.
        parts = torch.empty(self.size, num_rows, width, dtype=x.dtype, device=x.device)
        self._queue(x, self._communicator.allGather, x.data_ptr(), parts.data_ptr(), x.numel(), _DTYPES[x.dtype])
        return parts.transpose(0, 1).reshape(num_rows, self.size * width)

    @override
    def check(self) -> None:
        """Also asks NCCL for failures since then, such as a lost connection."""
        if found := self._asynchronous_error():
            self._fail(found)
        if self._failure:
            raise CollectiveFailed(self._failure)

    @override
    def abort(self) -> None:
        """The other ranks do not notice."""
        self._fail("the group was aborted")

    @override
    def close(self) -> None:
        """By an abort, because a gentler end waits for all other ranks."""
        self._fail("the group was closed")

    def _asynchronous_error(self) -> str:
        # Locked, because an abort frees the communicator that is asked here.
        with self._lock:
            try:
                if not self._failure:
                    self._communicator.check_async_error()
            except RuntimeError as error:
                return f"NCCL: {error}"
        return ""

    def _queue(self, x: Tensor, operation: Any, *arguments: int) -> None:
        if self._failure:
            raise CollectiveFailed(self._failure)
        if not x.numel():
            return
        try:
            operation(*arguments, _stream(self._device))
        except RuntimeError as error:
            self._fail(f"NCCL: {error}")
            raise CollectiveFailed(self._failure) from error

    def _fail(self, why: str) -> None:
        """Set the failure, then abort, once."""
        with self._lock:
            if self._failure:
                return
            self._failure = why
        # Not waited for, as `abort` promises: ending kernels that hang takes the device's time.
        _in_background(self._abort)

    def _abort(self) -> None:
        _set_device(self._device)
        try:
            self._communicator.abort()
        except RuntimeError as error:
            self._failure += f"; aborting the group failed too: {error}"


def _in_background(work: Any) -> None:
    threading.Thread(target=work, name="nccl-abort", daemon=True).start()


def _set_device(device: torch.device) -> None:
    """Set the current device of the calling thread; each thread has its own."""
    torch.cuda.set_device(device)


def _stream(device: torch.device) -> int:
    """Handle of the stream that torch queues on now, a capturing one included."""
    return torch.cuda.current_stream(device).cuda_stream


def _nccl() -> Any:
    try:
        module = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise BackendMissing(
            f"cupy.cuda.nccl cannot be imported ({error}): install kvmesh[cuda13] or kvmesh[cuda12]"
        ) from None
    if not module.available:
        raise BackendMissing("CuPy finds no NCCL: install nvidia-nccl-cu13 (or -cu12), as torch for CUDA does")
    return module
