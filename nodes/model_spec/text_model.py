"""Which architecture a `config.json` is of, and the fields that describe it: of a wrapper, those of its text part.

A wrapper is a model of text and images. Only what its text part needs is read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from nodes.model_spec.vector_heads import has_no_head, vector_architectures
from nodes.models.architecture import Architecture
from nodes.models.config_fields import ConfigFields
from nodes.models.errors import ModelUnsupported
from nodes.models.registry import ARCHITECTURES

_OF_BOTH: Final = ("eos_token_id", "quantization_config")
"""Fields that a wrapper has itself, or its text part; the wrapper's own wins, as in transformers."""


_WITHOUT_VISION: Final = "is served without its vision part, which is left out: it takes text only"


class _Kind(NamedTuple):
    """What a `model_type` stands for."""

    model_type: str
    names: tuple[str, ...]
    architecture: type[Architecture]
    is_wrapped: bool


def _kinds() -> Iterator[_Kind]:
    for architecture in ARCHITECTURES.values():
        names = architecture.names + vector_architectures(architecture.family)
        yield _Kind(architecture.model_type, names, architecture, is_wrapped=False)
        if architecture.wrapper:
            yield _Kind(architecture.wrapper.model_type, (architecture.wrapper.name,), architecture, is_wrapped=True)


_KINDS: Final = {kind.model_type: kind for kind in _kinds()}


class TextModel(NamedTuple):
    """A key of `ARCHITECTURES`, and the fields to describe the model by."""

    architecture: str
    fields: ConfigFields
    notes: tuple[str, ...]
    """What people should know of it, to follow the model's name."""
    named: str
    """The architecture by which `config.json` calls it, if that is one of `names` of its kind."""


def find_text_model(config: ConfigFields, path: Path) -> TextModel:
    """The model that the `config.json` at `path` describes. Raises ModelUnsupported or ModelDamaged."""
    names: Any = config.value("architectures") or []
    given = cast("list[Any]", names) if isinstance(names, list) else [names]
    named = next((kind for kind in _KINDS.values() if any(name in given for name in kind.names)), None)
    model_type: Any = config.value("model_type") or (named and named.model_type)
    # As in transformers, which goes by the type alone. Still, who names a kind that is not served here means it.
    kind = _KINDS.get(model_type) if isinstance(model_type, str) and (named or not given) else None
    if kind is None:
        what = f"architecture {names or model_type!r}"
        if named:
            what = f"model_type {model_type!r}, though it names the architectures {names!r}"
        supported = ", ".join(
            f"{name}{' (text only)' * kind.is_wrapped}"
            for kind in _KINDS.values()
            for name in kind.names
            if not has_no_head(name)
        )
        raise ModelUnsupported(
            f"{path} has the unsupported {what}. Supported: {supported}; of most also those without a head of words,"
            " such as LlamaModel and LlamaForSequenceClassification."
        )
    fields = _text_fields(config, kind.architecture) if kind.is_wrapped else config
    notes = (_WITHOUT_VISION,) if kind.is_wrapped else ()
    called = next((name for name in given if name in kind.names), "")
    if given and not called:
        notes += (f"is served as {model_type}, its model_type, though its config.json names the architectures {names}",)
    return TextModel(kind.architecture.model_type, fields, notes, called)


def _text_fields(config: ConfigFields, one: type[Architecture]) -> ConfigFields:
    assert one.wrapper is not None, "only wrappers have a text part"
    own: Any = config.value("text_config")
    if not isinstance(own, dict):
        raise config.damaged("text_config", "is not an object, though the model has a text part")
    inner = config.part(cast("dict[str, Any]", own))
    if inner.value("model_type") not in (None, one.model_type):
        raise config.unsupported("text_config", f"is of model_type {inner.value('model_type')!r}, not {one.model_type}")
    dtypes = (fields.value(key) for fields in (config, inner) for key in ("dtype", "torch_dtype"))
    outer = {key: config.value(key) for key in _OF_BOTH if config.value(key) is not None}
    # Ties them unless it says otherwise, and null does; what its text part says is not read, as in transformers.
    tied = config.document.get("tie_word_embeddings", True)
    outer["tie_word_embeddings"] = False if tied is None else tied
    fields = {**one.wrapper.defaults, **inner.document, **outer}
    return config.part(fields | {"dtype": next((dtype for dtype in dtypes if dtype), None), "torch_dtype": None})
