"""Qwen3 with mixtures of experts in place of its feed-forward layers, or of some of them."""

from typing import Any, Final, NamedTuple

from nodes.models.config_fields import MAX_INTEGER, ConfigFields
from nodes.models.decoder import Layer
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
    """Layers without experts have feed-forward layers of another width."""

    names = ("Qwen3MoeForCausalLM",)
    family = "Qwen3Moe"
    model_type = "qwen3_moe"
    default_head_dim = 0

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        # Read only if there are layers without experts, so files may leave out what has a default in transformers.
        shape = super().describe(config.part({"intermediate_size": 6144} | config.document))
        # transformers 5 writes this field under another name than the published files.
        num_experts = config.integer("num_experts", config.integer("num_local_experts", 128, least=0), least=0)
        step, plain = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers", -MAX_INTEGER)
        layers = range(shape["num_layers"])
        dense = [layer for layer in layers if not num_experts or layer in plain or (layer + 1) % step]
        if len(dense) == len(layers):
            return shape
        experts_per_token = config.integer("num_experts_per_tok", 8)
        if experts_per_token > num_experts:
            raise config.damaged("num_experts_per_tok", f"is more than the {num_experts} experts")
        return {
            **shape,
            "intermediate_size": config.integer("moe_intermediate_size", 768),
            "num_experts": num_experts,
            "experts_per_token": experts_per_token,
            "norm_topk_prob": config.boolean("norm_topk_prob"),
            "dense_layers": tuple(dense),
            "dense_size": shape["intermediate_size"] if dense else 0,
        }

    @classmethod
    def _windows(cls, config: ConfigFields, context_length: int) -> dict[str, Any]:
        # Unlike in Qwen3, of whose `max_window_layers` these models' files have a copy without a meaning.
        is_used = config.boolean("use_sliding_window") and config.has_window()
        return config.window_of_all(context_length, is_used=is_used)

    def _layer(self, index: int, prefix: str) -> Layer | MoeLayer:
        spec = self.spec
        layer: Layer = super()._layer(index, prefix)
        if not spec.num_experts:
            return layer
        if index in spec.dense_layers:
            mlp = f"{prefix}mlp."
            return layer._replace(gated=self._gated(mlp, "dense"), down=self._down(mlp, "dense"))
        names = [f"{prefix}mlp.experts.{number}." for number in range(spec.num_experts)]
        experts = tuple((self._gated(name), self._down(name)) for name in names)
        router = linear(f"{prefix}mlp.gate", spec.num_experts, spec.hidden_size)
        mixture = Experts(router, experts, spec.experts_per_token, spec.norm_topk_prob)
        return MoeLayer(layer.attention_norm, layer.qkv, layer.attention, layer.output, layer.mlp_norm, mixture)

    def _feed_forward(self, ops: Ops[Value], layer: Layer | MoeLayer, normed: Value, x: Value) -> Value:
        if isinstance(layer, MoeLayer):
            return ops.moe(normed, layer.experts, add=x)
        return super()._feed_forward(ops, layer, normed, x)


ARCHITECTURE: Final = Qwen3Moe
