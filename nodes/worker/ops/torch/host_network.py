"""A model on the CPU: `Ops` over torch, the oracle of all other implementations.

Hidden states are in the compute dtype, attention is in float32. Kernels are in `layers.linear`, memory is in
`attention`. A row's bits do not depend on the rows that are computed with it, provided that the kernels' do not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from nodes.model_spec import ModelSpec, RopeParameters
from nodes.models.ops import Ops
from nodes.models.parts import Attention, Embedding, Experts, Gated, Linear, Norm, parts_of
from nodes.models.registry import decoder
from nodes.worker.attention.base import AttentionBackend, Span
from nodes.worker.layers.linear import can_pack, make_linear, padded_rows
from nodes.worker.layers.mixture import mixture
from nodes.worker.layers.rotary import RotaryTable, rotate
from nodes.worker.weights.loader import WeightSource
from nodes.worker.weights.part_weights import PartWeights


class _Step(NamedTuple):
    """What all layers share; rows are padded."""

    token_ids: Tensor
    sampled: Tensor
    plan: Any
    angles: dict[RopeParameters, tuple[Tensor, Tensor]]


class TorchNetwork(Ops[Tensor]):
    """The weights of one model, ready to compute, and `Ops` on tensors. Raises what `source` raises.

    `tile_rows` as for `make_linear`.
    """

    def __init__(self, spec: ModelSpec, source: WeightSource, attention: AttentionBackend, tile_rows: int = 0) -> None:
        self.model = model = decoder(spec)
        self._tile_rows = tile_rows
        self._spec = spec
        self._attention = attention
        weights = PartWeights(model, source, spec.shard())
        self._embedding = weights.embedding
        self.dtype = self._embedding.dtype
        parts = (model.layers, model.norm, model.head)
        self._norms = {norm.weight.name: weights.norm(norm) for norm in parts_of((Norm,), parts)}
        linears = parts_of((Linear,), parts)
        self._linears = {one.name: make_linear(*weights.product(one), tile_rows) for one in linears}
        attentions = list(parts_of((Attention,), parts))
        self._rotary = {one.rope: RotaryTable(one.rope, spec.head_dim) for one in attentions}
        self._qk_norms = {one.layer: self._qk_norm(one.q_norm, one.k_norm) for one in attentions if one.q_norm}
        self._step: _Step | None = None

    @property
    def kernels(self) -> str:
        """What computes products: oneDNN on packed weights, or torch on plain ones."""
        return "plain" if self._tile_rows or not can_pack(self.dtype) else "packed"

    def forward(self, token_ids: Tensor, spans: Sequence[Span], sampled: Tensor) -> Tensor:
        """Logits `[len(sampled), vocab]` of the rows `sampled`; KV of all rows is written to the pages.

        `token_ids` (int64) holds one id per row, `spans` in the order of the rows (see `attention.base`).
        """
        num_rows = token_ids.shape[0]
        padding = token_ids.new_zeros(padded_rows(num_rows) - num_rows)
        positions = torch.cat((*(torch.arange(span.start, span.end) for span in spans), padding))
        angles = {rope: table.rows(positions) for rope, table in self._rotary.items()}
        self._step = _Step(torch.cat((token_ids, padding)), sampled, self._attention.plan(spans), angles)
        try:
            return self.model.run(self)
        finally:
            self._step = None

    @override
    def embed(self, by: Embedding) -> Tensor:
        """Hidden states `[rows, hidden]` of the step's tokens."""
        found = self._embedding.index_select(0, self._planned.token_ids)
        # Rounded as in training.
        return found if by.scale == 1 else found.mul_(torch.tensor(by.scale, dtype=found.dtype))

    @override
    def norm(self, x: Tensor, by: Norm, add: Tensor | None = None) -> Tensor:
        """In float32, returned in `x`'s dtype."""
        weight = self._norms[by.weight.name]
        normed = torch.rms_norm(x.float(), list(weight.shape), weight, by.eps).to(x.dtype)
        return normed if add is None else normed.add_(add)

    @override
    def linear(self, x: Tensor, by: Linear, add: Tensor | None = None) -> Tensor:
        """The product `[rows, out]` of `x` and the part's weight, with `add` added to it."""
        one = self._linears[by.name]
        return one(x) if add is None else one.plus(x, add)

    @override
    def gated(self, x: Tensor, by: Gated) -> Tensor:
        """Two products, not one of twice the width: fusing the activation saves more than the extra call costs."""
        gate, up = self._linears[by.gate.name], self._linears[by.up.name]
        return up.times(x, gate.silu(x) if by.activation == "silu" else _gelu_tanh(gate(x)))

    @override
    def moe(self, x: Tensor, by: Experts, add: Tensor) -> Tensor:
        """`add` plus the weighted results of each row's chosen experts."""

        def expert(number: int, some: Tensor) -> Tensor:
            gated, down = by.experts[number]
            return self.linear(self.gated(_padded(some), gated), down)[: some.shape[0]]

        return add.add_(mixture(x, self.linear(x, by.router), by, expert))

    @override
    def attend(self, qkv: Tensor, by: Attention) -> Tensor:
        """Attention over the layer's pages `[rows, heads * head_dim]`; keys and values are written first."""
        spec, step = self._spec, self._planned
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        turned = heads[:, : spec.num_heads + spec.num_kv_heads].to(torch.float32)
        if by.q_norm is not None:
            turned = self._normed_heads(turned, by.q_norm.eps, self._qk_norms[by.layer])
        turned = rotate(turned, *step.angles[by.rope])
        q, k = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        if by.scale != spec.head_dim**-0.5:
            # Backends always scale by `head_dim ** -0.5`.
            q = q * (by.scale * spec.head_dim**0.5)
        v = heads[:, spec.num_heads + spec.num_kv_heads :]
        return self._attention.attend(by.layer, step.plan, q, k, v).to(qkv.dtype)

    @override
    def select(self, x: Tensor) -> Tensor:
        """The rows of `x` that are sampled."""
        return x.index_select(0, self._planned.sampled)

    @override
    def head(self, x: Tensor, by: Linear) -> Tensor:
        """The logits of any number of rows, including none."""
        num_rows = x.shape[0]
        if not num_rows:
            return x.new_empty(0, self._spec.vocab_size)
        return self._linears[by.name](_padded(x))[:num_rows]

    @property
    def _planned(self) -> _Step:
        assert self._step is not None, "an operation outside of a step"
        return self._step

    def _qk_norm(self, q_norm: Norm, k_norm: Norm | None) -> Tensor:
        """Weights of all query heads, then of all key heads, float32 `[heads + kv_heads, head_dim]`."""
        assert k_norm is not None, "norms of queries and keys go together"
        counts = zip((q_norm, k_norm), (self._spec.num_heads, self._spec.num_kv_heads), strict=True)
        weights = [(self._norms[norm.weight.name], count) for norm, count in counts]
        return torch.cat([weight.view(-1, self._spec.head_dim).expand(count, -1) for weight, count in weights])

    def _normed_heads(self, heads: Tensor, eps: float, weight: Tensor) -> Tensor:
        """Each head by itself, or all query heads together and all key heads together."""
        if self._spec.qk_norm == "head":
            return torch.rms_norm(heads, [heads.shape[2]], None, eps).mul_(weight)
        num_heads = self._spec.num_heads
        parts = [part.flatten(1) for part in (heads[:, :num_heads], heads[:, num_heads:])]
        normed = [torch.rms_norm(part, [part.shape[1]], None, eps) for part in parts]
        return torch.cat(normed, 1).view(heads.shape).mul_(weight)


def _padded(x: Tensor) -> Tensor:
    padding = padded_rows(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0, 0, padding)) if padding else x


def _gelu_tanh(x: Tensor) -> Tensor:
    """`x / 2 * (1 + tanh(u))`, which is `x * sigmoid(2 * u)`. F.gelu rounds a call's last few elements differently."""
    wide = x.float()
    u = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    return (wide / (1 + torch.exp(-2 * u))).to(x.dtype)
