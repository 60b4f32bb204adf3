"""Llama: the base `Decoder`, with optional biases."""

from typing import Any, Final

from nodes.models.config_fields import ConfigFields
from nodes.models.decoder import Decoder


class Llama(Decoder):
    """Biases are present if `config.json` says so."""

    names = ("LlamaForCausalLM",)
    family = "Llama"
    model_type = "llama"

    @classmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        return {**super().describe(config), "mlp_bias": config.boolean("mlp_bias")}


ARCHITECTURE: Final = Llama
