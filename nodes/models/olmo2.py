"""OLMo 2 (Team OLMo 2024): norms after attention and feed-forward layer, not before; queries are normed whole."""

from typing import Any, Final

from nodes.models.config_fields import ConfigFields
from nodes.models.decoder import Decoder, Layer
from nodes.models.ops import Ops, Value


class Olmo2(Decoder):
    """Queries and keys are normalised over all heads together, which a rank cannot do with its own heads alone."""

    names = ("Olmo2ForCausalLM",)
    family = "Olmo2"
    model_type = "olmo2"

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        return {**super().describe(config), "rms_norm_eps": config.number("rms_norm_eps", 1e-5), "qk_norm": "all"}

    def _layer(self, index: int, prefix: str) -> Layer:
        hidden = self.spec.hidden_size
        layer: Layer = super()._layer(index, prefix)
        return layer._replace(
            attention_norm=self._norm(f"{prefix}post_attention_layernorm", hidden),
            mlp_norm=self._norm(f"{prefix}post_feedforward_layernorm", hidden),
        )

    def _run_layer(self, ops: Ops[Value], layer: Layer, x: Value) -> Value:
        attended = ops.attend(ops.linear(x, layer.qkv), layer.attention)
        x = ops.norm(ops.linear(attended, layer.output), layer.attention_norm, add=x)
        return ops.norm(ops.linear(ops.gated(x, layer.gated), layer.down), layer.mlp_norm, add=x)


ARCHITECTURE: Final = Olmo2
