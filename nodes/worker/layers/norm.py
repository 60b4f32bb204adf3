"""RMS norm, one row at a time in float32: a row's bits do not depend on its neighbours."""

import torch
from torch import Tensor


class RMSNorm:
    """`x / rms(x) * weight` over the last dimension; computed in float32, returned in `x`'s dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = list(weight.shape)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """`x` of shape `[..., size of weight]`."""
        return torch.rms_norm(x, self._shape, self._weight, self._eps)
