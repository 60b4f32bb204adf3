"""Products of a network over torch. On the CPU weights are packed once for oneDNN's kernels.

Packing takes batch-1 decoding from half of memory speed to nearly all of it. There a row's bits do not depend on the
other rows of the call as long as the number of rows is a multiple of `ROW_MULTIPLE` (`numerics` checks that on this
machine), so rows are padded.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE: Final = 4
_PACKED_FOR_ROWS: Final = 16
"""Packing for a single row picks another float32 kernel, whose bits differ from all others."""

_reorder = torch.ops.mkldnn._reorder_linear_weight.default  # noqa: SLF001 # what torch.compile calls too
_pointwise = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

Product = Callable[[Tensor], Tensor]
"""`x @ weight.T + bias` for `x` of shape `[rows, in]`; result `[rows, out]`."""


class PackedProduct:
    """oneDNN on a packed weight. The weight given is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = _reorder(weight, _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        return _pointwise(padded(x, ROW_MULTIPLE), self._weight, self._bias, "none", [], "")[:num_rows]


class PlainProduct:
    """`F.linear` on the weight as it is, in calls of a fixed number of rows if `tile_rows` is set."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tile_rows: int = 0) -> None:
        self._weight, self._bias, self._tile_rows = weight, bias, tile_rows

    def __call__(self, x: Tensor) -> Tensor:
        if not self._tile_rows:
            return F.linear(x, self._weight, self._bias)
        tiles = torch.split(padded(x, self._tile_rows), self._tile_rows)
        return torch.cat([F.linear(tile, self._weight, self._bias) for tile in tiles])[: x.shape[0]]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for `dtype` on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def make_product(weight: Tensor, bias: Tensor | None = None, tile_rows: int = 0) -> Product:
    """The fastest product whose bits do not depend on the batch.

    `tile_rows` > 0 runs it in calls of so many rows: a row's bits then do not depend on how many rows are computed with
    it, if the same shape always gets the same kernel.
    """
    if not tile_rows and can_pack(weight.device, weight.dtype):
        return PackedProduct(weight, bias)
    return PlainProduct(weight, bias, tile_rows)


def padded(x: Tensor, multiple: int) -> Tensor:
    """`x` with rows of zeros up to a multiple of so many."""
    padding = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, padding)) if padding else x
