"""Finds the architectures: each file of this folder with an `ARCHITECTURE`. A new one needs nothing but its file."""

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Final

from nodes.models.architecture import Architecture
from nodes.models.encoder import Encoder
from nodes.models.errors import ModelUnsupported
from nodes.models.parts import Parameter
from nodes.models.spec import ModelSpec


def _found() -> dict[str, type[Architecture]]:
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [import_module(f"nodes.models.{name}") for name in names]
    classes: list[type[Architecture]] = [module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")]
    return {architecture.model_type: architecture for architecture in classes}


ARCHITECTURES: Final = _found()
"""Keyed by `ModelSpec.architecture`, which is the `model_type` of a `config.json`."""


ENCODER_BODIES: Final = tuple({one.body: None for one in ARCHITECTURES.values() if issubclass(one, Encoder)})
"""What the names of encoders' tensors begin with."""


def model_of(spec: ModelSpec) -> Architecture:
    """The parts of a model. Raises ModelUnsupported."""
    found = ARCHITECTURES.get(spec.architecture)
    if found is None:
        raise ModelUnsupported(
            f"{spec.architecture!r} models are not supported; {', '.join(ARCHITECTURES)} are. Serve another model."
        )
    return found(spec)


def parameters(spec: ModelSpec) -> dict[str, Parameter]:
    """Every tensor of a model, as in `Architecture.parameters`. Raises ModelUnsupported."""
    return model_of(spec).parameters
