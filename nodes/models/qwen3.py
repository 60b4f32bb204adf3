"""Qwen3: Llama with an RMS norm on each head of queries and keys, and the windows of Qwen2."""

from typing import Any, Final

from nodes.models.config_fields import ConfigFields
from nodes.models.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Biases are present if `config.json` says so, as in Llama."""

    names = ("Qwen3ForCausalLM",)
    family = "Qwen3"
    model_type = "qwen3"
    default_head_dim = 128

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        bias = config.boolean("attention_bias")
        return {**super().describe(config), "qkv_bias": bias, "o_bias": bias, "qk_norm": "head"}


ARCHITECTURE: Final = Qwen3
