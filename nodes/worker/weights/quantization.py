"""int8 weights: each row of a matrix as whole numbers up to 127, times a 127th of its largest magnitude.

Only weights are quantised, when they are loaded; what they are multiplied with stays in the compute dtype. The matrices
of linear layers, the embedding and the head are quantised. Norms, biases and routers of experts are not: they are
small, and a router that chooses other experts changes more than rounding does. One scale for every 128 numbers instead
of every row was measured: the error of a logit is smaller by a tenth, which does not pay for reading the scales.
"""

from typing import Final

import torch
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.models.parts import Embedding, Experts, Linear, parts_of
from nodes.models.registry import model_of
from nodes.models.tensor_parallel import Part
from nodes.worker.errors import BackendMissing, WeightsUnfit
from nodes.worker.weights.loader import WeightSource

_LARGEST: Final = 127
_LEAST_SCALE: Final = torch.finfo(torch.float32).tiny


def quantized_names(spec: ModelSpec) -> frozenset[str]:
    """Names of the tensors that are int8; none if `spec` is not quantised."""
    if spec.quantization == "none":
        return frozenset()
    model = model_of(spec)
    routers = {one.router.name for one in parts_of((Experts,), model.parts)}
    linears = parts_of((Linear,), model.parts)
    names = {weight.name for one in linears if one.name not in routers for weight in one.weights}
    return frozenset(names | {one.weight.name for one in parts_of((Embedding,), model.parts)})


def rounded_to_int8(weight: Tensor, name: str = "") -> Tensor:
    """`weight`, `[out, in]`, rounded to what int8 and a row's scale can express, in its dtype. Raises WeightsUnfit."""
    rows = weight.float()
    scales = rows.abs().amax(1, keepdim=True) / _LARGEST
    if not scales.isfinite().all():
        raise WeightsUnfit(
            f"{name or 'a weight'} has numbers that are not finite, which int8 cannot express."
            " Download the model again."
        )
    # A row of zeros, or so small that a 127th of it is not a normal number, becomes zeros.
    divisors = torch.where(scales < _LEAST_SCALE, torch.inf, scales)
    return ((rows / divisors).round_() * scales).to(weight.dtype)


class QuantizedWeights:
    """A `WeightSource` that rounds another's numbers to int8: for torch, which computes with them as usual."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self._source = source
        self._names = quantized_names(spec)

    def tensor(self, name: str) -> Tensor:
        """One tensor, in its expected shape and dtype; raises WeightsUnfit as the source does."""
        tensor = self._source.tensor(name)
        return rounded_to_int8(tensor, name) if name in self._names else tensor

    def part(self, name: str, part: Part) -> Tensor:
        """Raises BackendMissing: ranks of a group do not compute with int8 weights."""
        raise BackendMissing(
            f"ranks do not support int8 weights ({name}, {part}): set quantize to none, or leave --tp out"
        )
