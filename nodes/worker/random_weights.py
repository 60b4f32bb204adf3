"""Seeded random weights of a real model's shape, for benchmarks and tests without a download.

The same name, shape and seed give the same tensor anywhere. Drawing half a billion normals takes seconds, so a tensor
repeats one drawn piece of prime length: no two rows of a matrix are alike, and filling runs at memory speed.
"""

import hashlib
from typing import Final

import torch
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.model_spec.weight_index import expected_shapes

_PIECE: Final = 1_048_573
_DEVIATION: Final = 0.02


class RandomWeights:
    """See `WeightSource`. Norms are near 1, everything else is normal with deviation 0.02."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._seed = spec.seed
        self._dtype = dtype
        self._shapes = expected_shapes(spec)

    def tensor(self, name: str) -> Tensor:
        """See `WeightSource`; raises KeyError for a name that the model does not have."""
        shape = self._shapes[name]
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        size = 1
        for length in shape:
            size *= length
        piece = torch.randn(min(size, _PIECE), generator=generator) * _DEVIATION
        if name.endswith("norm.weight"):
            piece += 1
        piece = piece.to(self._dtype)
        tensor = torch.empty(size, dtype=self._dtype)
        for begin in range(0, size, _PIECE):
            part = tensor[begin : begin + _PIECE]
            part.copy_(piece[: part.shape[0]])
        return tensor.view(shape)
