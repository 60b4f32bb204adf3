"""The fields of a `config.json`, checked one by one: types, ranges, and settings that are not supported here."""

import math
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
"""Fields that must be absent or have this value; any other asks for something that is not supported here."""


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

        `default_head_dim` is used if the file has no `head_dim`; 0: the hidden size divided by the number of heads.
        """
        self._refuse_unsupported()
        hidden = self.integer("hidden_size")
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        head_dim = self.integer("head_dim", default_head_dim or max(hidden // num_heads, 1))
        if num_heads % num_kv_heads:
            raise self.damaged("num_attention_heads", f"is not a multiple of num_key_value_heads ({num_kv_heads})")
        if head_dim % 2:
            raise self.damaged("head_dim", "is odd, but the rotary embedding rotates pairs")
        return {
            "num_layers": self.integer("num_hidden_layers"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": self.integer("vocab_size"),
            "context_length": self._context_length,
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6),
            "tie_word_embeddings": self.boolean("tie_word_embeddings"),
        }

    def windows(self, slides: Callable[[int], bool] | None, *, if_wide: bool = False) -> dict[str, Any]:
        """`sliding_window` and `sliding_layers` as transformers reads them, absent keys included.

        `slides` tells whether a layer slides if `layer_types` does not; None: no window is in use. A window that the
        whole context fits into is dropped, unless `if_wide`: sliding layers may differ in more than what they see.
        """
        num_layers = self.integer("num_hidden_layers")
        kinds = self.layer_types(num_layers)
        if slides is None:
            if kinds is not None and SLIDING in kinds:
                raise self.unsupported("layer_types", f"names {SLIDING}, but no sliding window is in use")
            return {}
        window = self.integer("sliding_window", 4096)
        if kinds is None:
            kinds = [SLIDING if slides(layer) else FULL for layer in range(num_layers)]
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
        is_window = layers and (if_wide or window < self._context_length)
        return {"sliding_window": window, "sliding_layers": layers} if is_window else {}

    def has_window(self) -> bool:
        """Whether there is a window: architectures that support one have it unless it is null."""
        return self.value("sliding_window") is not None or "sliding_window" not in self._document

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
        return dtype

    def number_between(self, key: str, least: float, most: float, default: float) -> float:
        """A number in a range, `default` if absent or null. Raises ModelDamaged."""
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

    def rope(self, kind: str = "", default_theta: float = 10_000.0) -> RopeParameters:
        """The rotary embedding, of layers of `kind` if layers differ. Raises ModelDamaged or ModelUnsupported."""
        # transformers 5 writes rope_parameters; 4 wrote rope_theta beside rope_scaling, its type once as "type".
        nested: Any = self.value("rope_parameters") or self.value("rope_scaling") or {}
        if kind and isinstance(nested, dict):
            nested = cast("dict[str, Any]", nested).get(kind, cast("Any", nested))
        if not isinstance(nested, dict):
            raise self.damaged("rope_parameters", "is not an object")
        rope = cast("dict[str, Any]", nested)
        if any(isinstance(value, dict) for value in rope.values()):
            raise self.unsupported("rope_parameters", "differ between layers")
        for fields in (rope, self._document):
            if self._number(fields, "partial_rotary_factor", 1.0) != 1.0:
                raise self.unsupported("partial_rotary_factor", "is not 1")
        theta = self._number(rope, "rope_theta", self.number("rope_theta", default_theta))
        name = rope.get("rope_type", rope.get("type", "default"))
        read = {"linear": self._linear, "llama3": self._llama3, "yarn": self._yarn, "longrope": self._longrope}
        if name not in ("default", *read):
            raise self.unsupported("rope_type", f"is {name!r}; supported are default, {', '.join(read)}")
        return RopeParameters(theta=theta) if name == "default" else read[name](rope, theta)

    def _linear(self, rope: dict[str, Any], theta: float) -> RopeParameters:
        return RopeParameters(rope_type="linear", theta=theta, factor=self._number(rope, "factor"))

    def _llama3(self, rope: dict[str, Any], theta: float) -> RopeParameters:
        return RopeParameters(
            rope_type="llama3",
            theta=theta,
            factor=self._number(rope, "factor"),
            low_freq_factor=self._number(rope, "low_freq_factor"),
            high_freq_factor=self._number(rope, "high_freq_factor"),
            original_context_length=self._original_context(rope),
        )

    def _yarn(self, rope: dict[str, Any], theta: float) -> RopeParameters:
        factor, truncate = self._number(rope, "factor"), rope.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self.damaged("truncate", f"should be true or false, not {truncate!r}")

        def strength(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

        both = rope.get("mscale") and rope.get("mscale_all_dim")
        own = strength(self._number(rope, "mscale")) / strength(self._number(rope, "mscale_all_dim")) if both else 0.0
        return RopeParameters(
            rope_type="yarn",
            theta=theta,
            factor=factor,
            original_context_length=self._original_context(rope),
            attention_factor=self._number(rope, "attention_factor", own or strength(1.0)),
            beta_fast=self._number(rope, "beta_fast", 32.0),
            beta_slow=self._number(rope, "beta_slow", 1.0),
            truncate=truncate,
        )

    def _longrope(self, rope: dict[str, Any], theta: float) -> RopeParameters:
        original, context = self._original_context(rope), self._context_length
        # Chosen once, by the context that the model has or the user requests (`ModelSpec.within`). If each call chose,
        # as elsewhere, a sequence that grows beyond the original context would have its first pages rotated one way
        # and its later pages another.
        short = self._divisors(rope, "short_factor")
        factor = self._number(rope, "factor", context / original)
        strength = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return RopeParameters(
            rope_type="longrope",
            theta=theta,
            factor=factor,
            original_context_length=original,
            attention_factor=self._number(rope, "attention_factor", strength),
            divisors=self._divisors(rope, "long_factor") if context > original else short,
            short_divisors=short if context > original else (),
        )

    def _divisors(self, rope: dict[str, Any], key: str) -> tuple[float, ...]:
        divisors: Any = rope.get(key)
        if not isinstance(divisors, list) or not all(
            isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < math.inf
            for one in cast("list[Any]", divisors)
        ):
            raise self.damaged(key, "is not a list of positive numbers")
        return tuple(float(one) for one in cast("list[Any]", divisors))

    def _original_context(self, rope: dict[str, Any]) -> int:
        beside = self.integer("original_max_position_embeddings", self._context_length)
        return int(self._number(rope, "original_max_position_embeddings", beside))

    @property
    def _context_length(self) -> int:
        return self.integer("max_position_embeddings", _DEFAULT_CONTEXT)

    def require(self, key: str, *known: Any) -> None:
        """Raise ModelUnsupported unless a field has one of these values; None: it may be missing."""
        if self.value(key) not in known:
            wanted = ", ".join(repr(one) for one in known if one is not None)
            raise self.unsupported(
                key, f"is {self.value(key)!r}; supported {'is' if len(known) < 3 else 'are'} {wanted}"
            )

    def _refuse_unsupported(self) -> None:
        if self.value("quantization_config"):
            raise self.unsupported("quantization_config", "is set; give a model that is not quantised")
        for key, neutral in _NEUTRAL.items():
            if self.value(key) not in (None, neutral):
                raise self.unsupported(key, f"is {self.value(key)!r}, which is not supported")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; `default` if absent or null. Raises ModelDamaged."""
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

    def number(self, key: str, default: float) -> float:
        """A positive number, `default` if absent or null. Raises ModelDamaged."""
        return self._number(self._document, key, default)

    def boolean(self, key: str, *, default: bool = False) -> bool:
        """True or false, `default` if absent or null. Raises ModelDamaged."""
        value: Any = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.damaged(key, f"should be true or false, not {value!r}")
        return default if value is None else value

    def damaged(self, key: str, why: str) -> ModelDamaged:
        """The error for a field that contradicts itself or another."""
        return ModelDamaged(f"{self._path}: {key} {why}. Download the file again, or correct it.")

    def unsupported(self, key: str, why: str) -> ModelUnsupported:
        """The error for a field whose value is not supported here."""
        return ModelUnsupported(f"{self._path}: {key} {why}. Serve another model.")
