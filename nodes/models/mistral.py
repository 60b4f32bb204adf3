"""Mistral: Llama in which either all layers have a sliding window or none has."""

from typing import Any, Final

from nodes.models.config_fields import FULL, SLIDING, ConfigFields
from nodes.models.decoder import Decoder, Wrapper


class Mistral(Decoder):
    """The window applies to attention (`ModelSpec.layer_windows`)."""

    names = ("MistralForCausalLM",)
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
        slides = config.has_window()
        num_layers = config.num_layers
        # transformers ignores layer_types here: if they contradict sliding_window, the intent is unknown.
        if config.layer_types(num_layers) not in (None, [SLIDING if slides else FULL] * num_layers):
            raise config.unsupported("layer_types", "and sliding_window contradict each other")
        return config.windows((lambda _: True) if slides else None, context_length)


ARCHITECTURE: Final = Mistral
