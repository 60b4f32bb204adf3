"""Mistral: Llama in which either all layers have a sliding window or none has."""

from typing import Any, Final

from nodes.models.architecture import Wrapper
from nodes.models.config_fields import ConfigFields
from nodes.models.decoder import Decoder


class Mistral(Decoder):
    """The window applies to attention (`ModelSpec.layer_windows`)."""

    names = ("MistralForCausalLM",)
    family = "Mistral"
    model_type = "mistral"
    wrapper = Wrapper(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "eos_token_id": 2,
        },
    )

    @classmethod
    def _windows(cls, config: ConfigFields, context_length: int) -> dict[str, Any]:
        return config.window_of_all(context_length, is_used=config.has_window())


ARCHITECTURE: Final = Mistral
