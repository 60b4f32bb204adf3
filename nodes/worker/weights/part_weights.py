"""Loads the tensors of a model's parts, for every implementation of its operations: this rank's, joined, once each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nodes.models.architecture import Architecture
from nodes.models.parts import LayerNorm, Linear, Norm, Parameter
from nodes.models.tensor_parallel import Shard
from nodes.worker.weights.loader import WeightSource


class PartWeights:
    """One rank's tensors of a model, on `device` or where `source` has them; the embedding, read first, is kept.

    Without `device` they may lie in their file: who keeps one takes a copy.

    Raises what `source` raises.
    """

    def __init__(
        self, model: Architecture, source: WeightSource, shard: Shard, device: torch.device | None = None
    ) -> None:
        self._source = source
        self._shard = shard
        self._device = device
        self._embedding_name = model.embedding.weight.name
        self.embedding = self._tensor(model.embedding.weight)

    def norm(self, norm: Norm) -> Tensor:
        """The weight plus its offset, `[size]`, in float32, so that adding the offset loses nothing of the weight."""
        return self._tensor(norm.weight).float() + norm.offset

    def layer_norm(self, norm: LayerNorm) -> tuple[Tensor, Tensor]:
        """Weight and bias, `[size]` each, in float32."""
        return self._tensor(norm.weight).float(), self._tensor(norm.bias).float()

    def table(self, parameter: Parameter) -> Tensor:
        """One tensor as it is."""
        return self._tensor(parameter)

    def product(self, *linears: Linear) -> tuple[Tensor, Tensor | None]:
        """Weight `[out, in]` and bias `[out]` of several products of one input; the embedding itself, if it is tied.

        A bias that is added to a sum over all ranks is given to the first of them alone.
        """
        weight = self._joined([parameter for one in linears for parameter in one.weights])
        biases = [bias for one in linears if not (one.is_summed and self._shard.rank) for bias in one.biases]
        return weight, self._joined(biases) if biases else None

    def _joined(self, parameters: Sequence[Parameter]) -> Tensor:
        if parameters[0].name == self._embedding_name:
            return self.embedding
        tensors = [self._tensor(parameter) for parameter in parameters]
        # A single tensor is not copied: it may be a whole matrix that is still in its file.
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _tensor(self, parameter: Parameter) -> Tensor:
        part = self._shard.part_of(parameter.cut)
        name = parameter.name
        found = self._source.tensor(name) if part is None else self._source.part(name, part)
        return found if self._device is None else found.to(self._device, copy=True)
