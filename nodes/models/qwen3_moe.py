"""Qwen3 with mixtures of experts in place of its feed-forward layers."""

from typing import Any, Final, NamedTuple

from nodes.models.config_fields import ConfigFields
from nodes.models.ops import Ops, Value
from nodes.models.parts import Attention, Experts, Linear, Norm, linear
from nodes.models.qwen3 import Qwen3


class MoeLayer(NamedTuple):
    """A layer with experts."""

    attention_norm: Norm
    qkv: Linear
    attention: Attention
    output: Linear
    mlp_norm: Norm
    experts: Experts


class Qwen3Moe(Qwen3):
    """All layers have experts: models in which some layers have none are refused."""

    names = ("Qwen3MoeForCausalLM",)
    model_type = "qwen3_moe"
    default_head_dim = 0

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        """Adds the fields of `ModelSpec` that this architecture reads. Raises ModelDamaged or ModelUnsupported."""
        config.require("decoder_sparse_step", None, 1)
        config.require("mlp_only_layers", None, [])
        # transformers 5 writes this field under another name than the published files.
        num_experts = config.integer("num_experts", config.integer("num_local_experts", 128))
        experts_per_token = config.integer("num_experts_per_tok", 8)
        if experts_per_token > num_experts:
            raise config.damaged("num_experts_per_tok", f"is more than the {num_experts} experts")
        return {
            **super().describe(config),
            "intermediate_size": config.integer("moe_intermediate_size", 768),
            "num_experts": num_experts,
            "experts_per_token": experts_per_token,
            "norm_topk_prob": config.boolean("norm_topk_prob"),
        }

    def _layer(self, index: int, prefix: str) -> MoeLayer:
        spec = self.spec
        layer = super()._layer(index, prefix)
        names = [f"{prefix}mlp.experts.{number}." for number in range(spec.num_experts)]
        experts = tuple((self._gated(name), self._down(name)) for name in names)
        router = linear(f"{prefix}mlp.gate", spec.num_experts, spec.hidden_size)
        mixture = Experts(router, experts, spec.experts_per_token, spec.norm_topk_prob)
        return MoeLayer(layer.attention_norm, layer.qkv, layer.attention, layer.output, layer.mlp_norm, mixture)

    def _feed_forward(self, ops: Ops[Value], layer: MoeLayer, normed: Value, x: Value) -> Value:
        return ops.moe(normed, layer.experts, add=x)


ARCHITECTURE: Final = Qwen3Moe
