"""Seeded random weights of a real model's shape, for benchmarks and tests without a download.

The same name, shape and seed give the same tensor anywhere. Drawing half a billion normals takes seconds, so a tensor
repeats one drawn piece of prime length: no two rows of a matrix are alike, and filling runs at memory speed.
"""

import hashlib
import math
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from nodes.model_spec import ModelSpec
from nodes.models.registry import parameters
from nodes.models.tensor_parallel import Part
from nodes.worker.weights.loader import WeightSource, padded_part

_PIECE: Final = 1_048_573
PROBE_PIECE: Final = 65_537
"""Enough where only a few layers are drawn, to be tried; a thousandth of a second, not sixteen, for each tensor."""
_DEVIATION: Final = 0.02


class RandomWeights(WeightSource):
    """Drawn, not read: normal with deviation 0.02 around each parameter's mean, which is 1 for most norms."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, piece: int = _PIECE) -> None:
        self._piece = piece
        self._seed = spec.seed
        self._dtype = dtype
        self._parameters = parameters(spec)

    @override
    def tensor(self, name: str) -> Tensor:
        """Raises KeyError for a name that the model does not have."""
        shape = self._parameters[name].shape
        return self._numbers(name, 0, math.prod(shape)).view(shape)

    @override
    def part(self, name: str, part: Part) -> Tensor:
        """The same numbers as in the whole tensor."""
        shape = self._parameters[name].shape
        if part.dim:
            return self.tensor(name)[:, part.begin : part.end].contiguous()
        begin, end = (min(index, shape[0]) for index in (part.begin, part.end))
        width = math.prod(shape[1:])
        return padded_part(self._numbers(name, begin * width, end * width).view(end - begin, *shape[1:]), part)

    def _numbers(self, name: str, begin: int, end: int) -> Tensor:
        """Elements `begin .. end-1` of a flattened tensor."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        parameter = self._parameters[name]
        piece = torch.randn(min(math.prod(parameter.shape), self._piece), generator=generator) * _DEVIATION
        piece = (piece + parameter.mean).to(self._dtype)
        tensor = torch.empty(end - begin, dtype=self._dtype)
        at = begin
        while at < end:
            first = at % self._piece
            part = piece[first : first + end - at]
            tensor[at - begin :][: part.shape[0]] = part
            at += part.shape[0]
        return tensor
