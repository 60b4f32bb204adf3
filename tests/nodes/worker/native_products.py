"""Calls of the native kernels of products and norms, for tests: the engine runs them from a `Program` only."""

import torch
from torch import Tensor

from nodes.models.parts import Activation
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.packed_weight import DTYPES, PackedWeight, row_bytes

_PLAIN, _PLUS = 0, 1
_GATED: dict[Activation, int] = {"silu": 2, "gelu_tanh": 3}


class Product:
    """`x @ weight.T + bias`, plus `add` if it is given; of gate and up `activation(gate(x)) * up(x)`; rounded once."""

    def __init__(
        self,
        library: Library,
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor, ...] = (),
        activation: Activation = "silu",
        *,
        is_int8: bool = False,
    ) -> None:
        self._run = library.functions.kvmesh_linear
        self._weight = PackedWeight(library, weights, biases, is_int8=is_int8)
        self._epilogue = _GATED[activation] if len(weights) == 2 else _PLAIN
        # Exact both ways: what the kernels keep rows as holds every number of the dtype, and only those.
        num_bytes = row_bytes(library, self._weight.torch_dtype)
        self._row_dtype = torch.float32 if num_bytes == torch.float32.itemsize else self._weight.torch_dtype

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`[rows, in]`, and `add` `[rows, out]`, in the weights' dtype, to `[rows, out]`."""
        weight, rows = self._weight, x.to(self._row_dtype).contiguous()
        y = torch.empty(x.shape[0], weight.width, dtype=self._row_dtype)
        added = None if add is None else add.to(self._row_dtype).contiguous()
        add_at, epilogue = (None, self._epilogue) if added is None else (added.data_ptr(), _PLUS)
        pointers = (rows.data_ptr(), weight.at, weight.bias_at, add_at, y.data_ptr())
        self._run(weight.dtype, weight.is_int8, epilogue, *pointers, x.shape[0], weight.width, weight.depth)
        return y.to(weight.torch_dtype)


def norm(library: Library, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`, a row each of `x`, `[rows, size of weight]`, in its dtype."""
    x, weight, y = x.contiguous(), weight.to(torch.float32), torch.empty_like(x)
    pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    library.functions.kvmesh_norm(DTYPES[x.dtype], *pointers, *x.shape, eps)
    return y
