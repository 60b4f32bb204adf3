"""What this package's own kernels have in common: bfloat16 in their source, and a launch in torch's current stream."""

import importlib
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from nodes.worker.errors import BackendMissing

# Eight warps: eight such blocks fill a multiprocessor's 2,048 threads.
NUM_THREADS: Final = 256
WARP: Final = 32

BFLOAT16: Final = """
typedef unsigned short bits;

static __device__ float wide(bits x) { return __uint_as_float((unsigned)x << 16); }

static __device__ bits narrow(float x)
{
    const unsigned u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (bits)(u >> 16 | 64);
    return (bits)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static __device__ float rounded(float x) { return wide(narrow(x)); }
"""
"""`bits` is a bfloat16; `narrow` rounds to the nearest, ties to even, and keeps NaN, as torch does."""


class Launcher:
    """Launches kernels of CuPy on `device`, in the stream that torch computes in, which may be capturing."""

    def __init__(self, cupy: Any, device: torch.device) -> None:
        self._from_external = cupy.cuda.Stream.from_external
        # torch has at most some dozens of streams.
        self._streams: dict[int, Any] = {}
        self._device = device

    def launch(self, kernel: Any, num_blocks: int, arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """With `NUM_THREADS` threads in a block, and so much shared memory besides what the kernel declares."""
        # CuPy's own current stream is not the one that torch captures: a launch there would be missing in the graph.
        with self._stream_of(torch.cuda.current_stream(self._device).cuda_stream):
            kernel((num_blocks,), (NUM_THREADS,), arguments, shared_mem=shared_bytes)

    def _stream_of(self, pointer: int) -> Any:
        stream = self._streams.get(pointer)
        if stream is None:
            stream = self._streams[pointer] = self._from_external(_Stream(pointer))
        return stream


class _Stream:
    """A stream of torch's, by the protocol that CuPy takes it by."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the stream."""
        return 0, self._pointer


def pointer(tensor: Tensor | None) -> np.uint64:
    return np.uint64(0 if tensor is None else tensor.data_ptr())


def load_cupy(what: str) -> Any:
    """CuPy, which a worker has loaded to map its pool. Raises BackendMissing; `what` names the kernel."""
    try:
        return importlib.import_module("cupy")
    # Its import raises what the loader says; the message says what to install.
    except Exception as error:
        raise not_compiled(what, error) from error


def not_compiled(what: str, error: Exception) -> BackendMissing:
    """What to raise for whatever CuPy, NVRTC or the driver say of a kernel."""
    return BackendMissing(
        f"the kernel {what} cannot be compiled ({type(error).__name__}: {error}): install kvmesh with the extra cuda12"
        " or cuda13, or set the worker's attention to torch"
    )
