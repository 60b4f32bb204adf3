"""How a model's makers want it sampled: `generation_config.json`, as far as it is computed here. Pure."""

from typing import Final

from nodes.models.config_fields import ConfigFields
from nodes.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, SamplingDefaults

_NOT_COMPUTED: Final = {"no_repeat_ngram_size": 0.0, "typical_p": 1.0}
"""Settings that would change what is drawn, and what they are where they change nothing."""
_MAX_TEMPERATURE: Final = 2.0


def read_sampling_defaults(generation: ConfigFields) -> SamplingDefaults:
    """The defaults of a `generation_config.json`. Raises ModelDamaged for a value that cannot be meant.

    `do_sample` is not looked at, as by other servers: a file that says false has temperatures for those who sample, and
    a request that names none means the model's own way.
    """
    return SamplingDefaults(
        temperature=generation.number_between("temperature", 0.0, _MAX_TEMPERATURE, 1.0),
        top_p=generation.number_between("top_p", 0.0, 1.0, 1.0),
        # -1 is vLLM's way to say that it is off.
        top_k=max(int(generation.number_between("top_k", -1, 2**31 - 1, 0)), 0),
        min_p=generation.number_between("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=generation.number_between(
            "repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, 1.0
        ),
    )


def not_computed(generation: ConfigFields) -> tuple[str, ...]:
    """What the file asks for and no sampler here does: `typical_p 0.9`."""
    found = {name: generation.number_between(name, 0.0, float("inf"), off) for name, off in _NOT_COMPUTED.items()}
    return tuple(f"{name} {value:g}" for name, value in found.items() if value != _NOT_COMPUTED[name])
