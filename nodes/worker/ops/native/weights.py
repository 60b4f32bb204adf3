"""A model's weights as the kernels read them."""

from typing import NamedTuple

from torch import Tensor

from nodes.models.decoder import Decoder
from nodes.models.parts import Gated, Linear, Norm, parts_of
from nodes.worker.ops.native.library import Library
from nodes.worker.ops.native.linear import PackedWeight
from nodes.worker.weights.part_weights import PartWeights


class Weights(NamedTuple):
    """Products, packed, and norms, float32, by the names of their parts and of their weights."""

    embedding: Tensor
    products: dict[str, PackedWeight]
    norms: dict[str, Tensor]


def pack_weights(model: Decoder, weights: PartWeights, library: Library) -> Weights:
    """Read and pack everything that `model` computes with. Raises what `weights` raises, and MemoryError."""
    packed = Weights(weights.embedding, {}, {})
    for part in parts_of((Norm, Gated, Linear), (model.layers, model.norm, model.head)):
        if isinstance(part, Norm):
            packed.norms[part.weight.name] = weights.norm(part).contiguous()
            continue
        own = (part.gate, part.up) if isinstance(part, Gated) else (part,)
        found = [weights.product(one) for one in own]
        biases = tuple(bias for _, bias in found if bias is not None)
        packed.products[part.name] = PackedWeight(library, tuple(weight for weight, _ in found), biases)
    return packed
