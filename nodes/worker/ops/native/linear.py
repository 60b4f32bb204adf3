"""Linear layers and norms by the native kernels: rows need no padding, for a row's bits never depend on the others."""

import weakref
from typing import Final

import torch
from torch import Tensor

from nodes.models.parts import Activation
from nodes.worker.errors import WeightsUnfit
from nodes.worker.ops.native.builds import Library

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}

_PLAIN: Final = 0
_PLUS: Final = 1
_GATED: Final[dict[Activation, int]] = {"silu": 2, "gelu_tanh": 3}


def row_bytes(library: Library, dtype: torch.dtype) -> int:
    """Bytes of a number of rows that products of `dtype` read: 4 of bfloat16 where no instruction takes pairs of it."""
    return library.functions.kvmesh_row_bytes(DTYPES[dtype])


class PackedWeight:
    """One weight, or gate and up of a gated layer, packed in memory of its own, which ends with this object.

    Weights are `[out, in]`, of one shape and dtype (float32 or bfloat16), and are not kept; nor are biases, `[out]`.
    With `is_int8` they are rounded to it, a row each with a scale (`weights/quantization.py` says how), and raise
    WeightsUnfit where they are not finite.
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
            raise MemoryError(f"no {num_bytes:,} bytes for a weight of {self.width} x {self.depth}")
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


class _Product:
    """Calls the library's products of rows, `[rows, in]` in the weight's dtype, with one weight."""

    def __init__(self, library: Library, weight: PackedWeight) -> None:
        self._run = library.functions.kvmesh_linear
        self.weight = weight
        # Exact both ways: what the kernels keep rows as holds every number of the dtype, and only those.
        num_bytes = row_bytes(library, weight.torch_dtype)
        self._row_dtype = torch.float32 if num_bytes == torch.float32.itemsize else weight.torch_dtype

    def _compute(self, epilogue: int, x: Tensor, add: Tensor | None) -> Tensor:
        weight, num_rows = self.weight, x.shape[0]
        x = x.contiguous()
        # What is of another size would be read past its end, where torch would have raised.
        assert x.shape == (num_rows, weight.depth), (x.shape, weight.depth)
        assert x.dtype == weight.torch_dtype, (x.dtype, weight.torch_dtype)
        y = torch.empty(num_rows, weight.width, dtype=self._row_dtype)
        if add is not None:
            assert add.shape == y.shape, (add.shape, y.shape)
            assert add.dtype == x.dtype, (add.dtype, x.dtype)
            add = add.contiguous().to(y.dtype)
        x = x.to(y.dtype)
        self._run(
            weight.dtype,
            weight.is_int8,
            epilogue,
            x.data_ptr(),
            weight.at,
            weight.bias_at,
            None if add is None else add.data_ptr(),
            y.data_ptr(),
            num_rows,
            weight.width,
            weight.depth,
        )
        return y.to(weight.torch_dtype)


class NativeLinear(_Product):
    """`x @ weight.T + bias`, plus `add` if it is given, rounded once."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, *, is_int8: bool = False) -> None:
        super().__init__(library, PackedWeight(library, (weight,), () if bias is None else (bias,), is_int8=is_int8))

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return self._compute(_PLAIN if add is None else _PLUS, x, add)


class NativeGated(_Product):
    """`activation(gate(x)) * up(x)` in one call, rounded once."""

    def __init__(
        self,
        library: Library,
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        biases: tuple[Tensor, ...] = (),
        *,
        is_int8: bool = False,
    ) -> None:
        super().__init__(library, PackedWeight(library, (gate, up), biases, is_int8=is_int8))
        self._epilogue = _GATED[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return self._compute(self._epilogue, x, None)


class NativeNorm:
    """`x / rms(x) * weight` over the last dimension; computed in float32, returned in `x`'s dtype."""

    def __init__(self, library: Library, weight: Tensor, eps: float) -> None:
        self._run = library.functions.kvmesh_norm
        self.weight = weight.to(torch.float32).contiguous()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """`x` of shape `[..., size of weight]`, float32 or bfloat16."""
        x, size = x.contiguous(), self.weight.shape[0]
        assert x.shape[-1] == size, (x.shape, size)
        y = torch.empty_like(x)
        rows = x.numel() // size
        self._run(DTYPES[x.dtype], x.data_ptr(), self.weight.data_ptr(), y.data_ptr(), rows, size, self.eps)
        return y
