"""Resolves what the user typed after `--model` to a `ModelSpec`."""

import os
from pathlib import Path
from typing import Final

import msgspec

from nodes.model_spec.directory import read_directory
from nodes.model_spec.fingerprint import WeightsReader
from nodes.model_spec.pooling_choice import PoolingChoice, with_pooling
from nodes.model_spec.presets import RANDOM_MODELS, echo_model, random_model
from nodes.models.spec import ModelSpec, WeightsRead

BUNDLED_DIRECTORY: Final = Path(__file__).parent.parent / "bundled"


def describe_model(model: str, pooling: PoolingChoice = "auto") -> ModelSpec:
    """The model named by `tiny`, `echo[?step_ms=…&token_us=…]`, `random:ARCH[?seed=…&dtype=…]` or a directory.

    `pooling` says how it makes vectors, instead of the directory. Reads configuration and weight headers, not weights,
    so a directory's model has no fingerprint: for who computes nothing with it. Raises a `ModelError` that says what to
    do.
    """
    return with_pooling(_describe(model), pooling)


def resolve_model(model: str, pooling: PoolingChoice = "auto", known: WeightsRead | None = None) -> ModelSpec:
    """As `describe_model`, with the fingerprint: reads all weights whose hash is not known yet, at about 1 GB a second
    and core. `known` is what another process found. Raises a `ModelError`.
    """
    return WeightsReader().read(describe_model(model, pooling), known)


def _describe(model: str) -> ModelSpec:
    name, _, options = model.partition("?")
    if name == "echo":
        return echo_model(options)
    if name.startswith("random:"):
        return random_model(name.removeprefix("random:"), options)
    if name == "tiny":
        # Stored in bfloat16 to be small, computed in float32, in which every machine gives the same bits.
        return msgspec.structs.replace(read_directory(BUNDLED_DIRECTORY / "tiny", name="tiny"), dtype="float32")
    # Unlike that of `Path`, it leaves the name of a user who does not exist as it is.
    return read_directory(Path(os.path.expanduser(model)))


def known_models() -> list[str]:
    return ["tiny", "echo", *(f"random:{name}" for name in RANDOM_MODELS)]
