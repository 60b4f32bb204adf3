"""Weights as the native kernels read them."""

import weakref
from typing import Final

import torch
from torch import Tensor

from nodes.worker.errors import WeightsUnfit
from nodes.worker.ops.native.builds import Library

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}


def row_bytes(library: Library, dtype: torch.dtype) -> int:
    """Bytes of each number in the rows that products read: 4 for bfloat16 if no instruction multiplies pairs of it."""
    return library.functions.kvmesh_row_bytes(DTYPES[dtype])


class PackedWeight:
    """One weight, or gate and up of a gated layer, packed in memory of its own, which is freed with this object.

    Weights are `[out, in]`, of one shape and dtype (float32 or bfloat16), and are not kept; nor are biases, `[out]`.
    With `is_int8` weights are rounded to int8 with a scale for each row (see `weights/quantization.py`); raises
    WeightsUnfit if they are not finite.
    """

    def __init__(
        self, library: Library, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...] = (), *, is_int8: bool = False
    ) -> None:
        functions = library.functions
        weights = tuple(weight.contiguous() for weight in weights)
        first, is_gated = weights[0], len(weights) == 2
        assert all(weight.shape == first.shape and weight.dtype == first.dtype for weight in weights)
        self.width, self.depth = first.shape
        self.torch_dtype, self.dtype = first.dtype, DTYPES[first.dtype]
        self.is_int8 = is_int8
        num_bytes = functions.kvmesh_packed_bytes(self.dtype, is_int8, is_gated, self.width, self.depth)
        self.at: int = functions.kvmesh_allocate(num_bytes)
        if not self.at:
            raise MemoryError(f"cannot allocate {num_bytes:,} bytes for a weight of {self.width} x {self.depth}")
        weakref.finalize(self, functions.kvmesh_free, self.at, num_bytes).atexit = False
        second = weights[1].data_ptr() if is_gated else None
        if functions.kvmesh_pack(self.dtype, is_int8, first.data_ptr(), second, self.width, self.depth, self.at):
            raise WeightsUnfit(
                f"a weight of {self.width} x {self.depth} has numbers that are not finite, which int8 cannot express."
                " Download the model again."
            )
        # float32, whatever the weights are: it is added to the sum before that is rounded.
        self._bias = torch.cat(biases).to(torch.float32) if biases else None
        self.bias_at = None if self._bias is None else self._bias.data_ptr()
