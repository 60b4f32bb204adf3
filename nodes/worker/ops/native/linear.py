"""Linear layers and norms by the native kernels: rows need no padding, for a row's bits never depend on the others."""

import weakref
from typing import Final

import torch
from torch import Tensor

from nodes.worker.ops.native.library import Library

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}

_PLAIN: Final = 0
_SILU: Final = 1
_TIMES: Final = 2
_PLUS: Final = 3


class NativeLinear:
    """A `Linear` on a weight that is packed once, in memory of its own, which ends with this object.

    `x` of any number of rows, float32 or bfloat16 like the weight. The weight given is not kept.
    """

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        functions, weight = library.functions, weight.contiguous()
        self._run = functions.kvmesh_linear
        self._dtype = DTYPES[weight.dtype]
        self._width, self._depth = weight.shape
        self._torch_dtype = weight.dtype
        num_bytes = functions.kvmesh_packed_bytes(self._dtype, self._width, self._depth)
        self._packed = functions.kvmesh_allocate(num_bytes)
        if self._packed is None:
            raise MemoryError(f"no {num_bytes:,} bytes for a weight of {self._width} x {self._depth}")
        weakref.finalize(self, functions.kvmesh_free, self._packed, num_bytes).atexit = False
        functions.kvmesh_pack(self._dtype, weight.data_ptr(), self._width, self._depth, self._packed)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """The plain product."""
        return self._compute(_PLAIN, x, None)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product, rounded once."""
        return self._compute(_SILU, x, None)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times `other`, rounded once."""
        return self._compute(_TIMES, x, other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`, rounded once."""
        return self._compute(_PLUS, x, other)

    def _compute(self, epilogue: int, x: Tensor, other: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        x = x.contiguous()
        # Wrong sizes would be read past their ends, where torch would have raised.
        assert x.shape == (num_rows, self._depth), (x.shape, self._depth)
        assert x.dtype == self._torch_dtype, (x.dtype, self._torch_dtype)
        y = torch.empty(num_rows, self._width, dtype=x.dtype)
        if other is not None:
            other = other.contiguous()
            assert other.shape == y.shape, (other.shape, y.shape)
            assert other.dtype == y.dtype, (other.dtype, y.dtype)
        self._run(
            self._dtype,
            epilogue,
            x.data_ptr(),
            self._packed,
            self._bias_at,
            None if other is None else other.data_ptr(),
            y.data_ptr(),
            num_rows,
            self._width,
            self._depth,
        )
        return y


class NativeNorm:
    """`x / rms(x) * weight` over the last dimension; computed in float32, returned in `x`'s dtype."""

    def __init__(self, library: Library, weight: Tensor, eps: float) -> None:
        self._run = library.functions.kvmesh_norm
        self._weight = weight.to(torch.float32).contiguous()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """`x` of shape `[..., size of weight]`, float32 or bfloat16."""
        x, size = x.contiguous(), self._weight.shape[0]
        assert x.shape[-1] == size, (x.shape, size)
        y = torch.empty_like(x)
        rows = x.numel() // size
        self._run(DTYPES[x.dtype], x.data_ptr(), self._weight.data_ptr(), y.data_ptr(), rows, size, self._eps)
        return y
