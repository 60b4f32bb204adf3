"""Gemma 3, text (Gemma Team 2025): norms before and after each half of a layer, most layers with a sliding window.

Sliding layers have a rotary embedding of their own. Norm weights are stored as their difference from one, embeddings
are scaled up, gates are GELU.
"""

from typing import Any, Final, NamedTuple

from nodes.models.architecture import Wrapper
from nodes.models.config_fields import FULL, SLIDING, ConfigFields
from nodes.models.decoder import Columns, Decoder, Layer
from nodes.models.ops import Ops, Value
from nodes.models.parts import Embedding, Gated, Norm, Parameter
from nodes.models.rope_fields import LayerKind, read_rope
from nodes.models.spec import RopeParameters

_FULL: Final = LayerKind(FULL, "rope_theta", 1e6)
_SLIDING: Final = LayerKind(SLIDING, "rope_local_base_freq", 1e4)


class GemmaLayer(NamedTuple):
    """A layer with the norms after its halves."""

    plain: Layer
    post_attention_norm: Norm
    post_mlp_norm: Norm


class Gemma3(Decoder):
    """Fields missing from `config.json` get the values of the published models, whose files omit them."""

    names = ("Gemma3ForCausalLM",)
    family = "Gemma3Text"
    model_type = "gemma3_text"
    wrapper = Wrapper(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "eos_token_id": 1,
        },
    )
    default_head_dim = 256
    norm_offset = 1.0
    activation = ("hidden_activation", "gelu_pytorch_tanh")

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        shape = super().describe(config)
        return {
            **shape,
            "sliding_rope": read_rope(config, shape["head_dim"], _SLIDING),
            # As in vLLM: `max_position_embeddings` of these models has been multiplied already.
            "max_context_length": config.context_length,
            "max_context_reason": "",
            "qk_norm": "head",
            "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            "tie_word_embeddings": config.boolean("tie_word_embeddings", default=True),
        }

    @classmethod
    def _windows(cls, config: ConfigFields, context_length: int) -> dict[str, Any]:
        every = config.integer("sliding_window_pattern", 6)
        # However wide: sliding layers differ in their rotary embedding, too.
        return config.windows(lambda layer: (layer + 1) % every > 0)

    @classmethod
    def _rope(cls, config: ConfigFields, head_dim: int) -> RopeParameters:
        return read_rope(config, head_dim, _FULL)

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

    def _gated(self, prefix: str, by: Columns = "inner") -> Gated:
        return super()._gated(prefix, by)._replace(activation="gelu_tanh")


ARCHITECTURE: Final = Gemma3
