"""A model on the CPU by the native kernels: `Ops` on tensors, whose operations are a call of the library each.

Hidden states are in the compute dtype; sums, norms, rotation and attention are in float32. Everything that a row's
result is made of has one order, so its bits depend neither on the batch nor on the number of threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nodes.model_spec import ModelSpec, RopeParameters
from nodes.models.parts import Attention, Embedding, Experts, Gated, Linear, Norm, Parameter, parts_of
from nodes.models.registry import decoder
from nodes.worker.attention.base import Span
from nodes.worker.layers.mixture import mixture
from nodes.worker.layers.rotary import RotaryTable
from nodes.worker.ops.native.attention import HeadNorms, NativeAttention, NativePlan, Rotation
from nodes.worker.ops.native.library import Library
from nodes.worker.ops.native.linear import NativeGated, NativeLinear, NativeNorm
from nodes.worker.ops.native.recording import Weights
from nodes.worker.weights.loader import WeightSource


class _Step(NamedTuple):
    """What all layers share."""

    token_ids: Tensor
    sampled: Tensor
    plan: NativePlan
    rotations: dict[RopeParameters, Rotation]


class NativeNetwork:
    """The weights of one model, packed, and `Ops` on tensors. Raises what `weights` raises."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, attention: NativeAttention, library: Library) -> None:
        self.model = model = decoder(spec)
        self.library = library
        self._spec = spec
        self._attention = attention
        self._weights = weights
        self._embedding = weights.tensor(model.embedding.weight.name)
        self.dtype = self._embedding.dtype
        self._linears: dict[str, NativeLinear] = {}
        self._gated: dict[str, NativeGated] = {}
        self._norms: dict[str, NativeNorm] = {}
        for part in parts_of((Norm, Gated, Linear), (model.layers, model.norm, model.head)):
            if isinstance(part, Norm):
                weight = weights.tensor(part.weight.name).float() + part.offset
                self._norms[part.weight.name] = NativeNorm(library, weight, part.eps)
            elif isinstance(part, Gated):
                gate, up = self._joined(part.gate.weights), self._joined(part.up.weights)
                biases = tuple(self._joined(one.biases) for one in (part.gate, part.up) if one.biases)
                self._gated[part.name] = NativeGated(library, gate, up, part.activation, biases)
            else:
                bias = self._joined(part.biases) if part.biases else None
                self._linears[part.name] = NativeLinear(library, self._joined(part.weights), bias)
        del self._weights
        ropes = {one.rope for one in parts_of((Attention,), model.layers)}
        self._rotary = {rope: RotaryTable(rope, spec.head_dim) for rope in ropes}
        self._step: _Step | None = None

    @property
    def kernels(self) -> str:
        """The instruction set, for another sums in another order."""
        return f"native-{self.library.name}"

    def set_threads(self, num_threads: int) -> None:
        """Compute with so many; torch's own stand still beside them, for what is left to it is small."""
        self.library.set_threads(num_threads)
        torch.set_num_threads(1)

    def forward(self, token_ids: Tensor, spans: Sequence[Span], sampled: Tensor) -> Tensor:
        """Logits `[len(sampled), vocab]` of the rows `sampled`; KV of all rows is written to the pages.

        `token_ids` (int64) holds one id per row, `spans` in the order of the rows.
        """
        plan = self._attention.plan(spans)
        rotations = {rope: Rotation(*table.tables(plan.num_positions)) for rope, table in self._rotary.items()}
        self._step = _Step(token_ids, sampled, plan, rotations)
        try:
            return self.model.run(self)
        finally:
            self._step = None

    def weights(self) -> Weights:
        """What a program is recorded with."""
        products = {name: one.weight for name, one in (*self._linears.items(), *self._gated.items())}
        return Weights(self._embedding, products, self._norms)

    def embed(self, by: Embedding) -> Tensor:
        """Hidden states `[rows, hidden]` of the step's tokens."""
        found = self._embedding.index_select(0, self._planned.token_ids)
        return found if by.scale == 1 else found.mul_(torch.tensor(by.scale, dtype=found.dtype))

    def norm(self, x: Tensor, by: Norm, add: Tensor | None = None) -> Tensor:
        """RMS norm of each row of `x`, with `add` added behind it."""
        normed = self._norms[by.weight.name](x)
        return normed if add is None else normed.add_(add)

    def linear(self, x: Tensor, by: Linear, add: Tensor | None = None) -> Tensor:
        """The product `[rows, out]` of `x` and the part's weight, with `add` added to it."""
        return self._linears[by.name](x, add)

    def gated(self, x: Tensor, by: Gated) -> Tensor:
        """`activation(gate(x)) * up(x)`, `[rows, inner]`."""
        return self._gated[by.name](x)

    def moe(self, x: Tensor, by: Experts, add: Tensor) -> Tensor:
        """See `Ops`. Products are the kernels', who goes through which is torch's."""

        def expert(number: int, rows: Tensor) -> Tensor:
            gated, down = by.experts[number]
            return self.linear(self.gated(rows, gated), down)

        return add.add_(mixture(x, self.linear(x, by.router), by, expert))

    def attend(self, qkv: Tensor, by: Attention) -> Tensor:
        """Attention over the layer's pages `[rows, heads * head_dim]`; keys and values are written first."""
        step, norms = self._planned, None
        if by.q_norm is not None and by.k_norm is not None:
            query, key = (self._norms[norm.weight.name] for norm in (by.q_norm, by.k_norm))
            if self._spec.qk_norm == "head":
                norms = HeadNorms(query.weight, key.weight, by.q_norm.eps)
            else:
                self._norm_all(qkv, query, key)
        return self._attention.attend_projected(by.layer, step.plan, qkv, by.scale, step.rotations[by.rope], norms)

    def select(self, x: Tensor) -> Tensor:
        """The rows of `x` that are sampled."""
        return x.index_select(0, self._planned.sampled)

    def head(self, x: Tensor, by: Linear) -> Tensor:
        """See `Ops`; any number of rows, none included."""
        return self._linears[by.name](x)

    @property
    def _planned(self) -> _Step:
        assert self._step is not None, "an operation outside of a step"
        return self._step

    def _norm_all(self, qkv: Tensor, query: NativeNorm, key: NativeNorm) -> None:
        """All query heads together, and all key heads together, in place."""
        begin = 0
        for norm in (query, key):
            part = qkv[:, begin : begin + norm.weight.shape[0]]
            part.copy_(norm(part))
            begin += norm.weight.shape[0]

    def _joined(self, parameters: Sequence[Parameter]) -> Tensor:
        if parameters[0].name == self.model.embedding.weight.name:
            return self._embedding
        tensors = [self._weights.tensor(parameter.name) for parameter in parameters]
        # One alone is not copied: it may be a whole matrix that is still in its file.
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
