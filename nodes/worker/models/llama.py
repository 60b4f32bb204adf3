"""Llama: rotary embedding, grouped attention, gated feed-forward, RMS norms before each. Also the frame of the others.

Only the shape of the network is here; kernels are in `layers`, memory is in `attention`.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.worker.attention.base import AttentionBackend, Span
from nodes.worker.layers.embedding import Embedding, LMHead
from nodes.worker.layers.linear import Linear, make_linear, padded_rows
from nodes.worker.layers.mlp import GatedMLP
from nodes.worker.layers.norm import RMSNorm
from nodes.worker.layers.rotary import RotaryTable, rotate
from nodes.worker.weights.loader import WeightSource


class LayerWeights(NamedTuple):
    """One decoder layer, ready to compute."""

    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: RMSNorm
    mlp: GatedMLP


class Llama:
    """A decoder over a paged pool. Hidden states are in the compute dtype, attention is in float32."""

    has_qk_norm: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, weights: WeightSource, attention: AttentionBackend, tile_rows: int = 0) -> None:
        self._spec = spec
        self._attention = attention
        self._tile_rows = tile_rows
        self._rotary = RotaryTable(spec.rope, spec.head_dim)
        embedding = weights.tensor("model.embed_tokens.weight")
        self.dtype = embedding.dtype
        self.embedding = Embedding(embedding)
        self.layers = [self._load_layer(weights, f"model.layers.{layer}.") for layer in range(spec.num_layers)]
        self.norm = RMSNorm(weights.tensor("model.norm.weight"), spec.rms_norm_eps)
        self.head = LMHead(embedding if spec.tie_word_embeddings else weights.tensor("lm_head.weight"), tile_rows)

    def forward(self, token_ids: Tensor, spans: Sequence[Span], sampled: Tensor) -> Tensor:
        """Logits `[len(sampled), vocab]` of the rows `sampled`; KV of all rows is written to the pages.

        `token_ids` (int64) holds one id per row, `spans` in the order of the rows (see `attention.base`).
        """
        num_rows = token_ids.shape[0]
        plan = self._attention.plan(spans)
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        padding = token_ids.new_zeros(padded_rows(num_rows) - num_rows)
        cos, sin = self._rotary.rows(torch.cat((positions, padding)))
        hidden = self.embedding(torch.cat((token_ids, padding)))
        for index, layer in enumerate(self.layers):
            q, k, v = self._project(layer, layer.attention_norm(hidden), cos, sin)
            attended = self._attention.attend(index, plan, q, k, v)
            hidden = layer.output.plus(attended.to(hidden.dtype), hidden)
            hidden = layer.mlp(layer.mlp_norm(hidden), hidden)
        if not sampled.shape[0]:
            return hidden.new_empty(0, self._spec.vocab_size)
        return self.head(self.norm(hidden.index_select(0, sampled)))

    def _project(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._spec
        heads = layer.qkv(x).view(x.shape[0], -1, spec.head_dim)
        turned = heads[:, : spec.num_heads + spec.num_kv_heads].to(torch.float32)
        if layer.qk_norm is not None:
            turned = torch.rms_norm(turned, [spec.head_dim], None, spec.rms_norm_eps).mul_(layer.qk_norm)
        turned = rotate(turned, cos, sin)
        values = heads[:, spec.num_heads + spec.num_kv_heads :]
        return turned[:, : spec.num_heads], turned[:, spec.num_heads :], values

    def _load_layer(self, weights: WeightSource, prefix: str) -> LayerWeights:
        spec = self._spec

        def linear(*names: str, bias: bool) -> Linear:
            weight = _joined([weights.tensor(f"{prefix}{name}.weight") for name in names])
            biases = _joined([weights.tensor(f"{prefix}{name}.bias") for name in names]) if bias else None
            return make_linear(weight, biases, self._tile_rows)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.tensor(f"{prefix}{name}.weight"), spec.rms_norm_eps)

        return LayerWeights(
            attention_norm=norm("input_layernorm"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=spec.qkv_bias),
            qk_norm=self._load_qk_norm(weights, prefix) if self.has_qk_norm else None,
            output=linear("self_attn.o_proj", bias=spec.o_bias),
            mlp_norm=norm("post_attention_layernorm"),
            mlp=GatedMLP(
                linear("mlp.gate_proj", bias=spec.mlp_bias),
                linear("mlp.up_proj", bias=spec.mlp_bias),
                linear("mlp.down_proj", bias=spec.mlp_bias),
            ),
        )

    def _load_qk_norm(self, weights: WeightSource, prefix: str) -> Tensor:
        """Norm weights of all query and key heads, float32 `[heads + kv_heads, head_dim]`."""
        q, k = (weights.tensor(f"{prefix}self_attn.{name}_norm.weight").to(torch.float32) for name in "qk")
        return torch.cat((q.expand(self._spec.num_heads, -1), k.expand(self._spec.num_kv_heads, -1)))


def _joined(tensors: list[Tensor]) -> Tensor:
    # One alone is not copied: it may be a whole matrix that is still in its file.
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
