"""The fields of a `config.json`, checked one by one: types, ranges, and settings that nothing here computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from nodes.models.errors import ModelDamaged, ModelUnsupported
from nodes.models.spec import RopeParameters

_DTYPES: Final = ("float32", "bfloat16", "float16")
_STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_INTEGER: Final = 1 << 31
_DEFAULT_CONTEXT: Final = 2048
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_NEUTRAL: Final[dict[str, Any]] = {
    "attention_multiplier": 1,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "residual_multiplier": 1,
    "use_bidirectional_attention": False,
}
"""Fields of which any other value asks for something that nothing here computes."""


class ConfigFields:
    """A configuration document and the path that its errors name."""

    def __init__(self, document: dict[str, Any], path: Path) -> None:
        self._document = document
        self._path = path

    def value(self, key: str) -> Any:
        """The raw value, None if absent."""
        return self._document.get(key)

    def shape(self, default_head_dim: int = 0) -> dict[str, Any]:
        """The fields of a `ModelSpec` that all architectures have. Raises ModelDamaged or ModelUnsupported.

        `default_head_dim`: of a head where none is given; 0: what the heads share.
        """
        self._refuse_unsupported()
        hidden = self.integer("hidden_size")
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        head_dim = self.integer("head_dim", default_head_dim or max(hidden // num_heads, 1))
        if num_heads % num_kv_heads:
            raise self.damaged("num_attention_heads", f"is not a multiple of num_key_value_heads ({num_kv_heads})")
        if head_dim % 2:
            raise self.damaged("head_dim", "is odd, and the rotary embedding turns pairs")
        return {
            "num_layers": self.integer("num_hidden_layers"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": self.integer("vocab_size"),
            "context_length": self.integer("max_position_embeddings", _DEFAULT_CONTEXT),
            "rms_norm_eps": self._number(self._document, "rms_norm_eps", 1e-6),
            "rope": self._rope(),
            "tie_word_embeddings": self.boolean("tie_word_embeddings"),
        }

    def windows(self, slides: Callable[[int], bool] | None) -> dict[str, Any]:
        """`sliding_window` and `sliding_layers` as transformers reads them, absent keys included.

        `slides` says of a layer whether it does where `layer_types` does not; None: no window is in use. A window that
        the context fits into is none.
        """
        num_layers = self.integer("num_hidden_layers")
        kinds = self.layer_types(num_layers)
        if slides is None:
            if kinds is not None and SLIDING in kinds:
                raise self.unsupported("layer_types", f"names {SLIDING}, and no sliding window is in use")
            return {}
        window = self.integer("sliding_window", 4096)
        if kinds is None:
            kinds = [SLIDING if slides(layer) else FULL for layer in range(num_layers)]
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
        context_length = self.integer("max_position_embeddings", _DEFAULT_CONTEXT)
        return {"sliding_window": window, "sliding_layers": layers} if layers and window < context_length else {}

    def has_window(self) -> bool:
        """Whether there is a window, which the classes that know one have unless it is null."""
        return self.value("sliding_window") is not None or "sliding_window" not in self._document

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Of each layer `FULL` or `SLIDING`; None where the file says nothing."""
        kinds: Any = self.value("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in cast("list[Any]", kinds)):
            raise self.unsupported("layer_types", f"names others than {FULL} and {SLIDING}")
        named = cast("list[str]", kinds)
        if len(named) != num_layers:
            raise self.damaged("layer_types", f"names {len(named)} layers of {num_layers}")
        return named

    def dtype(self, stored: set[str]) -> str:
        """The checkpoint's own dtype, float16 included: as configured (`dtype`, `torch_dtype`), else as stored."""
        named = self.value("dtype") or self.value("torch_dtype")
        if named is None:
            kinds = stored & set(_STORED_DTYPES)
            return _STORED_DTYPES[kinds.pop()] if len(kinds) == 1 else "float32"
        dtype = str(named).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ModelUnsupported(f"{self._path}: dtype {named!r} is not computed here; known: {', '.join(_DTYPES)}.")
        return dtype

    def number_between(self, key: str, least: float, most: float, default: float) -> float:
        """A number in a range, `default` where there is none (or null). Raises ModelDamaged."""
        value: Any = self.value(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.damaged(key, f"should be a number from {least:g} to {most:g}, not {value!r}")
        return float(value)

    def token_id(self, key: str) -> int | None:
        """The first id of a field that holds one id, several, or none."""
        return next(iter(self.token_ids(key)), None)

    def token_ids(self, key: str) -> list[int]:
        """The ids of a field that holds one id, several, or none."""
        value: Any = self.value(key)
        ids = cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise self.damaged(key, "is not a token id or a list of token ids")
        return ids

    def _rope(self) -> RopeParameters:
        # transformers 5 writes rope_parameters; 4 wrote rope_theta beside rope_scaling, whose type was once "type".
        nested: Any = self.value("rope_parameters") or self.value("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise self.damaged("rope_parameters", "is not an object")
        rope = cast("dict[str, Any]", nested)
        if any(isinstance(value, dict) for value in rope.values()):
            raise self.unsupported("rope_parameters", "differ between layers")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise self.unsupported("rope_type", f"is {kind!r}; known are default, linear and llama3")
        for fields in (rope, self._document):
            if self._number(fields, "partial_rotary_factor", 1.0) != 1.0:
                raise self.unsupported("partial_rotary_factor", "is not 1")
        theta = self._number(rope, "rope_theta", self._number(self._document, "rope_theta", 10_000.0))
        if kind == "default":
            return RopeParameters(theta=theta)
        if kind == "linear":
            return RopeParameters(rope_type="linear", theta=theta, factor=self._number(rope, "factor"))
        context = self._number(
            rope, "original_max_position_embeddings", self.integer("max_position_embeddings", _DEFAULT_CONTEXT)
        )
        return RopeParameters(
            rope_type="llama3",
            theta=theta,
            factor=self._number(rope, "factor"),
            low_freq_factor=self._number(rope, "low_freq_factor"),
            high_freq_factor=self._number(rope, "high_freq_factor"),
            original_context_length=int(context),
        )

    def require(self, key: str, *known: Any) -> None:
        """Raise ModelUnsupported unless a field has one of these values; None: it may be missing."""
        if self.value(key) not in known:
            wanted = ", ".join(repr(one) for one in known if one is not None)
            raise self.unsupported(key, f"is {self.value(key)!r}; known {'is' if len(known) < 3 else 'are'} {wanted}")

    def _refuse_unsupported(self) -> None:
        if self.value("quantization_config"):
            raise self.unsupported("quantization_config", "is set; give a model that is not quantised")
        for key, neutral in _NEUTRAL.items():
            if self.value(key) not in (None, neutral):
                raise self.unsupported(key, f"is {self.value(key)!r}, which nothing here computes")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; `default` where there is none (or null). Raises ModelDamaged."""
        value: Any = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_INTEGER:
            kind = "a positive integer" if least else "an integer of at least 0"
            raise self.damaged(key, f"should be {kind}, not {value!r}")
        return value

    def _number(self, fields: dict[str, Any], key: str, default: float | None = None) -> float:
        value: Any = fields.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.damaged(key, f"should be a positive number, not {value!r}")
        return float(value)

    def boolean(self, key: str) -> bool:
        """True or false, false where there is none (or null). Raises ModelDamaged."""
        value: Any = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.damaged(key, f"should be true or false, not {value!r}")
        return bool(value)

    def damaged(self, key: str, why: str) -> ModelDamaged:
        """The error for a field that contradicts itself or another."""
        return ModelDamaged(f"{self._path}: {key} {why}. Download the file again, or correct it.")

    def unsupported(self, key: str, why: str) -> ModelUnsupported:
        """The error for a field that nothing here computes."""
        return ModelUnsupported(f"{self._path}: {key} {why}. Serve another model.")
