"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; upper layers may have a sliding window."""

from typing import Any, Final

from nodes.models.config_fields import ConfigFields
from nodes.models.decoder import Decoder


class Qwen2(Decoder):
    """It always has these biases; `config.json` cannot switch them off."""

    names = ("Qwen2ForCausalLM",)
    family = "Qwen2"
    model_type = "qwen2"

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        return {**super().describe(config), "qkv_bias": True, "o_bias": False}

    @classmethod
    def _windows(cls, config: ConfigFields, context_length: int) -> dict[str, Any]:
        if not config.boolean("use_sliding_window") or not config.has_window():
            return config.windows(None, context_length)
        first = config.integer("max_window_layers", 28, least=0)
        return config.windows(lambda layer: layer >= first, context_length)


ARCHITECTURE: Final = Qwen2
