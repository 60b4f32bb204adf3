"""Gemma 3, text (Gemma Team 2025): norms before and after each half of a layer, most layers with a sliding window.

Sliding layers have a rotary embedding of their own. Norm weights are stored as their difference from one, embeddings
are scaled up, gates are GELU.
"""

from typing import Any, Final, NamedTuple

from nodes.models.config_fields import FULL, SLIDING, ConfigFields
from nodes.models.decoder import Decoder, Layer
from nodes.models.ops import Ops, Value
from nodes.models.parts import Embedding, Gated, Norm, Parameter
from nodes.models.spec import RopeParameters


class GemmaLayer(NamedTuple):
    """A layer with the norms after its halves."""

    plain: Layer
    post_attention_norm: Norm
    post_mlp_norm: Norm


class Gemma3(Decoder):
    """Fields missing from `config.json` get the values of the published models, whose files omit them."""

    names = ("Gemma3ForCausalLM",)
    model_type = "gemma3_text"
    default_head_dim = 256
    norm_offset = 1.0

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        """Adds the fields of `ModelSpec` that this architecture reads. Raises ModelDamaged or ModelUnsupported."""
        config.require("hidden_activation", None, "gelu_pytorch_tanh")
        return {
            **super().describe(config),
            "sliding_rope": cls._sliding_rope(config),
            "qk_norm": "head",
            "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            "tie_word_embeddings": config.boolean("tie_word_embeddings", default=True),
        }

    @classmethod
    def _windows(cls, config: ConfigFields) -> dict[str, Any]:
        every = config.integer("sliding_window_pattern", 6)
        return config.windows(lambda layer: (layer + 1) % every > 0, if_wide=True)

    @classmethod
    def _rope(cls, config: ConfigFields) -> RopeParameters:
        return config.rope(FULL, default_theta=1e6)

    @classmethod
    def _sliding_rope(cls, config: ConfigFields) -> RopeParameters:
        if config.value("rope_parameters"):
            return config.rope(SLIDING)
        return RopeParameters(theta=config.number("rope_local_base_freq", 10_000.0))

    def _layer(self, index: int, prefix: str) -> GemmaLayer:
        hidden = self.spec.hidden_size
        plain: Layer = super()._layer(index, prefix)
        return GemmaLayer(
            plain._replace(mlp_norm=self._norm(f"{prefix}pre_feedforward_layernorm", hidden)),
            self._norm(f"{prefix}post_attention_layernorm", hidden),
            self._norm(f"{prefix}post_feedforward_layernorm", hidden),
        )

    def _run_layer(self, ops: Ops[Value], layer: GemmaLayer, x: Value) -> Value:
        plain = layer.plain
        attended = ops.attend(ops.linear(ops.norm(x, plain.attention_norm), plain.qkv), plain.attention)
        x = ops.norm(ops.linear(attended, plain.output), layer.post_attention_norm, add=x)
        gated = ops.gated(ops.norm(x, plain.mlp_norm), plain.gated)
        return ops.norm(ops.linear(gated, plain.down), layer.post_mlp_norm, add=x)

    def _embedding(self, weight: Parameter) -> Embedding:
        return Embedding(weight, self.spec.hidden_size**0.5)

    def _gated(self, prefix: str) -> Gated:
        return super()._gated(prefix)._replace(activation="gelu_tanh")


ARCHITECTURE: Final = Gemma3
