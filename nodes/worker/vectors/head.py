"""What comes behind a pooling: the products of `ModelSpec.pooling`, one vector after the other, in float32.

A vector's numbers depend on nothing but itself: neither on those beside it nor on the number of threads. A product of
BLAS would promise neither; `numpy.einsum` without `optimize` computes each of its numbers by one loop in this thread.
For 3,072 numbers of 768, as of EmbeddingGemma, that takes 1.3 ms.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.models.pooling import Dense, DenseActivation
from nodes.models.tensor_parallel import Part
from nodes.worker.errors import WeightsUnfit
from nodes.worker.vectors.pooling import Floats
from nodes.worker.weights.loader import SafetensorsWeights, WeightSource
from nodes.worker.weights.random_weights import RandomWeights

_ACTIVATIONS: Final[Mapping[DenseActivation, Callable[[Tensor], Tensor]]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
}


class _Layer(NamedTuple):
    weight: Floats
    bias: Floats | None
    activation: Callable[[Tensor], Tensor]


class VectorHead:
    """The products behind the pooling of one model, none if it has none. Raises WeightsUnfit while it is made."""

    def __init__(self, spec: ModelSpec) -> None:
        dense = spec.pooling.dense if spec.pooling else ()
        # Opened once more, beside what the network is loaded from: nobody counts this towards its progress.
        own = _own_weights(spec) if any(not one.path for one in dense) else None
        self._layers = [_Layer(*_read(one, own), _ACTIVATIONS[one.activation]) for one in dense]

    def __call__(self, vector: Floats) -> Floats:
        """`[num_dimensions]` from a pooled state, `[hidden]`; both float32."""
        for weight, bias, activation in self._layers:
            product = np.einsum("oi,i->o", weight, vector)
            vector = activation(torch.from_numpy(product if bias is None else product + bias)).numpy()
        return vector


def _own_weights(spec: ModelSpec) -> WeightSource:
    return RandomWeights(spec, torch.float32) if spec.source == "random" else SafetensorsWeights(spec, torch.float32)


def _read(dense: Dense, own: WeightSource | None) -> tuple[Floats, Floats | None]:
    if dense.path:
        return _stored(dense, dense.weight), _stored(dense, dense.bias) if dense.bias else None
    assert own is not None, "opened for this"
    if dense.rows:
        # Of a head with as many rows as there are words, only these are read.
        weight = torch.cat([own.part(dense.weight, Part(0, row, row + 1)) for row in dense.rows])
    else:
        weight = own.tensor(dense.weight)
    return weight.clone().numpy(), own.tensor(dense.bias).clone().numpy() if dense.bias else None


def _stored(dense: Dense, name: str) -> Floats:
    try:
        found = cast("Tensor", safe_open(dense.path, framework="pt").get_tensor(name)).float()
    except (OSError, SafetensorError) as error:
        raise WeightsUnfit(f"{name!r} in {dense.path} cannot be read: {error}. Download it again.") from error
    shape = (dense.num_out, dense.num_in) if name == dense.weight else (dense.num_out,)
    if tuple(found.shape) != shape:
        raise WeightsUnfit(
            f"{name!r} in {dense.path} has shape {list(found.shape)}, not {list(shape)}: it has changed."
        )
    if not found.isfinite().all():
        raise WeightsUnfit(f"{name!r} in {dense.path} has numbers that are not finite. Download it again.")
    return found.clone().numpy()
