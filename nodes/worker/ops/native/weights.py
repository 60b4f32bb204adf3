"""A model's weights as the kernels read them."""

from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor

from nodes.models.architecture import Architecture
from nodes.models.parts import Gated, LayerNorm, Linear, Norm, parts_of
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.packed_weight import PackedWeight
from nodes.worker.weights.part_weights import PartWeights


class Weights(NamedTuple):
    """Packed products by the names of their parts, float32 norms by the names of their weights and biases, and what an
    embedding adds for positions and types, by the names of those tables.

    `dtype` is the compute dtype. An int8 embedding is packed, and is also the head's weight if the two are tied.
    """

    dtype: torch.dtype
    embedding: Tensor | PackedWeight
    products: dict[str, PackedWeight]
    norms: dict[str, Tensor]
    tables: dict[str, Tensor] = {}


def pack_weights(
    model: Architecture, weights: PartWeights, library: Library, quantized: Container[str] = frozenset()
) -> Weights:
    """Read and pack everything that `model` computes with; weights named in `quantized` as int8.

    Raises what `weights` raises, MemoryError, and WeightsUnfit if int8 cannot express a weight.
    """
    name, embedding = model.embedding.weight.name, weights.embedding
    table = PackedWeight(library, (embedding,), is_int8=True) if name in quantized else embedding.clone()
    tables = (one for one in (model.embedding.positions, model.embedding.types) if one is not None)
    packed = Weights(embedding.dtype, table, {}, {}, {one.name: weights.table(one).clone() for one in tables})
    for part in parts_of((Norm, LayerNorm, Gated, Linear), model.parts):
        if isinstance(part, Norm):
            packed.norms[part.weight.name] = weights.norm(part).contiguous()
            continue
        if isinstance(part, LayerNorm):
            weight, bias = weights.layer_norm(part)
            packed.norms.update({part.weight.name: weight.clone(), part.bias.name: bias.clone()})
            continue
        # Tied to the embedding: packed once and read by both, otherwise the largest matrix would be in memory twice.
        if part.name == name and isinstance(table, PackedWeight):
            packed.products[name] = table
            continue
        own = (part.gate, part.up) if isinstance(part, Gated) else (part,)
        found = [weights.product(one) for one in own]
        biases = tuple(bias for _, bias in found if bias is not None)
        packed.products[part.name] = PackedWeight(
            library, tuple(weight for weight, _ in found), biases, is_int8=part.name in quantized
        )
    return packed
