"""Linear layers on the CPU: oneDNN kernels on weights packed once, with the element-wise work that follows fused in.

Packing takes batch-1 decoding from half of memory speed to nearly all of it. A row's bits do not depend on the other
rows of the call as long as the number of rows is a multiple of `ROW_MULTIPLE` (`numerics` checks that on this machine);
callers pad. `F.linear` does the same where oneDNN cannot.
"""

from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

ROW_MULTIPLE: Final = 4
_PACKED_FOR_ROWS: Final = 16
"""Packing for a single row picks another float32 kernel, whose bits differ from all others."""

_reorder = torch.ops.mkldnn._reorder_linear_weight.default  # noqa: SLF001 # what torch.compile calls too
_pointwise = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
_pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001


class Linear(Protocol):
    """`x @ weight.T + bias` for `x` of shape `[rows, in]`, rows a multiple of `ROW_MULTIPLE`; result `[rows, out]`."""

    def __call__(self, x: Tensor) -> Tensor:
        """The plain product."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times `other`, element by element."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`, rounded once."""
        ...


class PackedLinear(Linear):
    """oneDNN on a packed weight. The weight given is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = _reorder(weight, _PACKED_FOR_ROWS)
        self._bias = bias

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return _pointwise(x, self._weight, self._bias, "none", [], "")

    @override
    def silu(self, x: Tensor) -> Tensor:
        return _pointwise(x, self._weight, self._bias, "swish", [], "")

    @override
    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return _pointwise_binary(x, other, self._weight, self._bias, "mul")

    @override
    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return _pointwise_binary(x, other, self._weight, self._bias, "add")


class PlainLinear(Linear):
    """`F.linear` on the weight as it is, in calls of a fixed number of rows if `tile_rows` is set."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tile_rows: int = 0) -> None:
        self._weight = weight
        self._bias = bias
        self._tile_rows = tile_rows

    @override
    def __call__(self, x: Tensor) -> Tensor:
        if not self._tile_rows:
            return F.linear(x, self._weight, self._bias)
        num_rows = x.shape[0]
        padding = -num_rows % self._tile_rows
        tiles = torch.split(F.pad(x, (0, 0, 0, padding)), self._tile_rows)
        return torch.cat([F.linear(tile, self._weight, self._bias) for tile in tiles])[:num_rows]

    @override
    def silu(self, x: Tensor) -> Tensor:
        product = self(x)
        # F.silu rounds the last few elements of a call differently: they go through scalar code.
        return product / (1 + torch.exp(-product))

    @override
    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) * other

    @override
    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) + other


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for `dtype` on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def make_linear(weight: Tensor, bias: Tensor | None = None, tile_rows: int = 0) -> Linear:
    """The fastest layer whose bits do not depend on the batch; `tile_rows` as `numerics` found necessary (0: not)."""
    if not tile_rows and weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias, tile_rows)


def padded_rows(num_rows: int) -> int:
    """How many rows, with padding, a batch of `num_rows` is computed as."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
