"""Which architecture a `config.json` is of, and the fields that describe it: of a wrapper, those of its text part.

A wrapper is a model of text and images. Only what its text part needs is read.
"""

from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from nodes.models.config_fields import ConfigFields
from nodes.models.decoder import Decoder
from nodes.models.errors import ModelUnsupported
from nodes.models.registry import ARCHITECTURES

_OF_BOTH: Final = ("eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields that a wrapper has itself, or its text part; the wrapper's own wins, as in transformers."""


class TextModel(NamedTuple):
    """A key of `ARCHITECTURES`, and the fields to describe the model by."""

    architecture: str
    fields: ConfigFields
    is_wrapped: bool = False


def find_text_model(config: ConfigFields, path: Path) -> TextModel:
    """The model that the `config.json` at `path` describes. Raises ModelUnsupported or ModelDamaged."""
    names: Any = config.value("architectures") or []
    model_type: Any = config.value("model_type")
    given = cast("list[Any]", names) if isinstance(names, list) else []
    for known, one in ARCHITECTURES.items():
        if any(name in one.names for name in given) or (not names and model_type == known):
            return TextModel(known, config)
        wrapper = one.wrapper
        if wrapper and (wrapper.name in given or (not names and model_type == wrapper.model_type)):
            return TextModel(known, _text_fields(config, one), is_wrapped=True)
    supported = ", ".join(name for one in ARCHITECTURES.values() for name in (*one.names, *_wrapper_names(one)))
    raise ModelUnsupported(f"{path} has the unsupported architecture {names or model_type!r}. Supported: {supported}.")


def _wrapper_names(one: type[Decoder]) -> tuple[str, ...]:
    return (f"{one.wrapper.name} (text only)",) if one.wrapper else ()


def _text_fields(config: ConfigFields, one: type[Decoder]) -> ConfigFields:
    assert one.wrapper is not None, "only wrappers have a text part"
    own: Any = config.value("text_config")
    if not isinstance(own, dict):
        raise config.damaged("text_config", "is not an object, though the model has a text part")
    inner = config.part(cast("dict[str, Any]", own))
    if inner.value("model_type") not in (None, one.model_type):
        raise config.unsupported("text_config", f"is of model_type {inner.value('model_type')!r}, not {one.model_type}")
    dtypes = (fields.value(key) for fields in (config, inner) for key in ("dtype", "torch_dtype"))
    outer = {key: config.value(key) for key in _OF_BOTH if config.value(key) is not None}
    # Their config says so unless it says otherwise, whatever text models of that kind do by themselves.
    fields = {"tie_word_embeddings": True, **one.wrapper.defaults, **inner.document, **outer}
    return config.part(fields | {"dtype": next((one for one in dtypes if one), None), "torch_dtype": None})
