"""The fields of a `config.json`, checked one by one: types, ranges, and settings that are not supported here."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from nodes.models.errors import ModelDamaged, ModelUnsupported

_DTYPES: Final = {name: name for name in ("float32", "bfloat16", "float16")} | {"float": "float32", "half": "float16"}
"""By what a file may call them: all names that torch has."""
_STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MAX_INTEGER: Final = 1 << 31
"""Sizes and ids go as i32 through steps and kernels; anything larger is damage."""
_DEFAULT_CONTEXT: Final = 2048
_MAX_LAYERS: Final = 10_000
"""Published models have up to about 130."""
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_NEUTRAL: Final[dict[str, Any]] = {
    "attention_multiplier": 1,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "is_causal": True,
    "logit_scale": 1,
    "logits_scaling": 1,
    "residual_multiplier": 1,
    "use_bidirectional_attention": False,
}
"""Fields that must be absent or have this value; any other asks for something that is not supported here."""


class ConfigFields:
    """A `config.json`, read from `path`. Absent or null fields get defaults; what does not fit raises ModelDamaged."""

    def __init__(self, document: dict[str, Any], path: Path) -> None:
        self.document = document
        self._path = path

    def part(self, document: dict[str, Any]) -> "ConfigFields":
        return ConfigFields(document, self._path)

    def value(self, key: str) -> Any:
        """The raw value, None if absent."""
        return self.document.get(key)

    def shape(self, default_head_dim: int = 0, *, is_rotated: bool = True) -> dict[str, Any]:
        """The fields of a `ModelSpec` that all architectures have. Raises ModelDamaged or ModelUnsupported.

        `default_head_dim` is used if the file has no `head_dim`; 0: the hidden size divided by the number of heads.
        With `is_rotated` heads have a rotary embedding.
        """
        self._refuse_unsupported()
        hidden = self.integer("hidden_size")
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        head_dim = self.integer("head_dim", default_head_dim or max(hidden // num_heads, 1))
        if num_heads % num_kv_heads:
            raise self.damaged("num_attention_heads", f"is not a multiple of num_key_value_heads ({num_kv_heads})")
        if is_rotated and head_dim % 2:
            raise self.damaged("head_dim", "is odd, but the rotary embedding rotates pairs")
        return {
            "num_layers": self.num_layers,
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": self.integer("vocab_size"),
            "context_length": self.context_length,
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6),
            "tie_word_embeddings": self.boolean("tie_word_embeddings"),
        }

    def windows(self, slides: Callable[[int], bool] | None, context_length: int = MAX_INTEGER) -> dict[str, Any]:
        """`sliding_window` and `sliding_layers` as transformers reads them, absent keys included.

        `slides` tells whether a layer slides if `layer_types` does not; None: no window is in use. A window that a
        whole context of `context_length` fits into is dropped.
        """
        num_layers = self.num_layers
        kinds = self.layer_types(num_layers)
        if slides is None:
            if kinds is not None and SLIDING in kinds:
                raise self.unsupported("layer_types", f"names {SLIDING}, but no sliding window is in use")
            return {}
        window = self.integer("sliding_window", 4096)
        if kinds is None:
            kinds = [SLIDING if slides(layer) else FULL for layer in range(num_layers)]
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
        is_window = layers and window < context_length
        return {"sliding_window": window, "sliding_layers": layers} if is_window else {}

    def window_of_all(self, context_length: int, *, is_used: bool) -> dict[str, Any]:
        """`windows` of architectures in which all layers are alike. Raises ModelUnsupported."""
        num_layers = self.num_layers
        # transformers ignores layer_types here: if they contradict the window, the intent is unknown.
        if self.layer_types(num_layers) not in (None, [SLIDING if is_used else FULL] * num_layers):
            raise self.unsupported("layer_types", "and sliding_window contradict each other")
        return self.windows((lambda _: True) if is_used else None, context_length)

    def has_window(self) -> bool:
        """Whether there is a window: architectures that support one have it unless it is null."""
        return self.value("sliding_window") is not None or "sliding_window" not in self.document

    def layer_types(self, num_layers: int) -> list[str] | None:
        """`FULL` or `SLIDING` for each layer; None if the file does not say."""
        kinds: Any = self.value("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in cast("list[Any]", kinds)):
            raise self.unsupported("layer_types", f"has entries other than {FULL} and {SLIDING}")
        named = cast("list[str]", kinds)
        if len(named) != num_layers:
            raise self.damaged("layer_types", f"has {len(named)} entries for {num_layers} layers")
        return named

    def dtype(self, stored: set[str]) -> str:
        """The checkpoint's own dtype, float16 included: as configured (`dtype`, `torch_dtype`), else as stored.

        Raises ModelUnsupported for one that is not supported here.
        """
        named = self.value("dtype") or self.value("torch_dtype")
        if named is None:
            kinds = stored & set(_STORED_DTYPES)
            return _STORED_DTYPES[kinds.pop()] if len(kinds) == 1 else "float32"
        dtype = str(named).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ModelUnsupported(
                f"{self._path}: dtype {named!r} is not supported; supported are {', '.join(_DTYPES)}."
            )
        return _DTYPES[dtype]

    def number_between(self, key: str, least: float, most: float, default: float) -> float:
        value: Any = self.value(key)
        if value is None:
            return default
        bounded = isinstance(value, int | float) and least <= value <= min(most, sys.float_info.max)
        if not bounded or isinstance(value, bool):
            raise self.damaged(key, f"should be a number from {least:g} to {most:g}, not {value!r}")
        return float(value)

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """The ids of a field that holds one id, several, or none; -1 is none, as in old files. Raises ModelDamaged."""
        ids = [i for i in self.integers(key, -1, "a token id or a list of token ids") if i >= 0]
        if beyond := [i for i in ids if i >= vocab_size]:
            raise self.damaged(key, f"is {beyond[0]}, but vocab_size is {vocab_size}: the model has no such token")
        return ids

    def integers(self, key: str, least: int = 0, what: str = "an index or a list of indices") -> list[int]:
        """The whole numbers of a field that holds one, several, or none: `what`. Raises ModelDamaged."""
        value: Any = self.value(key)
        found = cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < least for i in found):
            raise self.damaged(key, f"is not {what}")
        return found

    @property
    def num_layers(self) -> int:
        """Not as many as would fill the memory with descriptions of layers. Raises ModelDamaged."""
        return self.integer("num_hidden_layers", most=_MAX_LAYERS)

    @property
    def context_length(self) -> int:
        """Positions that the model was made for; a rotary embedding may be made for more."""
        return self.integer("max_position_embeddings", _DEFAULT_CONTEXT)

    def require(self, key: str, *known: Any) -> None:
        """Raise ModelUnsupported unless a field has one of these values; None: it may be missing."""
        if self.value(key) not in known:
            wanted = ", ".join(repr(value) for value in known if value is not None)
            raise self.unsupported(
                key, f"is {self.value(key)!r}; supported {'is' if len(known) < 3 else 'are'} {wanted}"
            )

    def _refuse_unsupported(self) -> None:
        if self.value("quantization_config"):
            raise self.unsupported("quantization_config", "is set; give a model that is not quantised")
        for key, neutral in _NEUTRAL.items():
            if self.value(key) not in (None, neutral):
                raise self.unsupported(key, f"is {self.value(key)!r}, which is not supported")

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_INTEGER - 1) -> int:
        value: Any = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            kind = "a positive integer" if least else "an integer of at least 0"
            bound = "" if most >= MAX_INTEGER - 1 else f" up to {most:,}"
            raise self.damaged(key, f"should be {kind}{bound}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.damaged(key, f"should be a positive number, not {value!r}")
        return float(value)

    def boolean(self, key: str, *, default: bool = False) -> bool:
        value: Any = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.damaged(key, f"should be true or false, not {value!r}")
        return default if value is None else value

    def damaged(self, key: str, why: str) -> ModelDamaged:
        return ModelDamaged(f"{self._path}: {key} {why}. Download the file again, or correct it.")

    def unsupported(self, key: str, why: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self._path}: {key} {why}. Serve another model.")
