"""How a model's makers want it sampled: the settings of `generation_config.json` that are supported here. Pure."""

from typing import Final

from nodes.models.config_fields import ConfigFields
from nodes.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, SamplingDefaults

_NOT_COMPUTED: Final = {"no_repeat_ngram_size": 0.0, "typical_p": 1.0}
"""Settings that would change what is drawn but are not supported, each with the value at which it changes nothing."""
_MAX_TEMPERATURE: Final = 2.0
"""As requests are bounded (`openai_types.py`, after OpenAI)."""


def read_sampling_defaults(generation: ConfigFields) -> SamplingDefaults:
    """Raises ModelDamaged for a value out of range. `do_sample` is ignored, as in other servers: a file that sets it to
    false still gives temperatures for callers who sample, and a request that names none wants the model's own.
    """
    return SamplingDefaults(
        temperature=generation.number_between("temperature", 0.0, _MAX_TEMPERATURE, 1.0),
        top_p=generation.number_between("top_p", 0.0, 1.0, 1.0),
        # -1 turns it off in vLLM.
        top_k=max(int(generation.number_between("top_k", -1, 2**31 - 1, 0)), 0),
        min_p=generation.number_between("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=generation.number_between(
            "repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, 1.0
        ),
    )


def generation_notes(name: str, generation: ConfigFields) -> list[str]:
    """What model `name` asks for that no sampler here supports, such as `typical_p 0.9`, as a sentence; or nothing."""
    found = {key: generation.number_between(key, 0.0, float("inf"), off) for key, off in _NOT_COMPUTED.items()}
    asked = [f"{key} {value:g}" for key, value in found.items() if value != _NOT_COMPUTED[key]]
    return [f"{name} asks for {', '.join(asked)}, which is not supported and left out"] if asked else []
