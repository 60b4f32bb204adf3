"""The fields of a `config.json`, checked one by one: types, ranges, and settings that nothing here computes."""

from pathlib import Path
from typing import Any, Final, cast

from nodes.model_spec.errors import ModelDamaged, ModelUnsupported
from nodes.model_spec.spec import RopeParameters

_DTYPES: Final = ("float32", "bfloat16", "float16")
_STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_INTEGER: Final = 1 << 31
_DEFAULT_HEAD_DIM: Final = {"qwen3": 128}
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


class ConfigFields:
    """A configuration document and the path that its errors name."""

    def __init__(self, document: dict[str, Any], path: Path) -> None:
        self._document = document
        self._path = path

    def value(self, key: str) -> Any:
        """The raw value, None if absent."""
        return self._document.get(key)

    def shape(self, architecture: str) -> dict[str, Any]:
        """All shape fields of a `ModelSpec`. Raises ModelDamaged or ModelUnsupported."""
        self._refuse_unsupported()
        hidden = self._integer("hidden_size")
        num_heads = self._integer("num_attention_heads")
        num_kv_heads = self._integer("num_key_value_heads", num_heads)
        head_dim = self._integer("head_dim", _DEFAULT_HEAD_DIM.get(architecture, max(hidden // num_heads, 1)))
        if num_heads % num_kv_heads:
            raise self._damaged("num_attention_heads", f"is not a multiple of num_key_value_heads ({num_kv_heads})")
        if head_dim % 2:
            raise self._damaged("head_dim", "is odd, and the rotary embedding turns pairs")
        attention_bias = self._boolean("attention_bias")
        num_layers = self._integer("num_hidden_layers")
        context_length = self._integer("max_position_embeddings", 2048)
        return {
            "num_layers": num_layers,
            "hidden_size": hidden,
            "intermediate_size": self._integer("intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": self._integer("vocab_size"),
            "context_length": context_length,
            "rms_norm_eps": self._number(self._document, "rms_norm_eps", 1e-6),
            "rope": self._rope(),
            "tie_word_embeddings": self._boolean("tie_word_embeddings"),
            # Qwen2 always has these biases and no switch for them.
            "qkv_bias": architecture == "qwen2" or attention_bias,
            "o_bias": attention_bias and architecture != "qwen2",
            "mlp_bias": self._boolean("mlp_bias") and architecture == "llama",
            **self._windows(architecture, num_layers, context_length),
        }

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
            raise self._damaged(key, f"should be a number from {least:g} to {most:g}, not {value!r}")
        return float(value)

    def token_id(self, key: str) -> int | None:
        """The first id of a field that holds one id, several, or none."""
        return next(iter(self.token_ids(key)), None)

    def token_ids(self, key: str) -> list[int]:
        """The ids of a field that holds one id, several, or none."""
        value: Any = self.value(key)
        ids = cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise self._damaged(key, "is not a token id or a list of token ids")
        return ids

    def _rope(self) -> RopeParameters:
        # transformers 5 writes rope_parameters; 4 wrote rope_theta beside rope_scaling, whose type was once "type".
        nested: Any = self.value("rope_parameters") or self.value("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise self._damaged("rope_parameters", "is not an object")
        rope = cast("dict[str, Any]", nested)
        if any(isinstance(value, dict) for value in rope.values()):
            raise self._unsupported("rope_parameters", "differ between layers")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise self._unsupported("rope_type", f"is {kind!r}; known are default, linear and llama3")
        for fields in (rope, self._document):
            if self._number(fields, "partial_rotary_factor", 1.0) != 1.0:
                raise self._unsupported("partial_rotary_factor", "is not 1")
        theta = self._number(rope, "rope_theta", self._number(self._document, "rope_theta", 10_000.0))
        if kind == "default":
            return RopeParameters(theta=theta)
        if kind == "linear":
            return RopeParameters(rope_type="linear", theta=theta, factor=self._number(rope, "factor"))
        context = self._number(rope, "original_max_position_embeddings", self._integer("max_position_embeddings", 2048))
        return RopeParameters(
            rope_type="llama3",
            theta=theta,
            factor=self._number(rope, "factor"),
            low_freq_factor=self._number(rope, "low_freq_factor"),
            high_freq_factor=self._number(rope, "high_freq_factor"),
            original_context_length=int(context),
        )

    def _windows(self, architecture: str, num_layers: int, context_length: int) -> dict[str, Any]:
        """`sliding_window` and `sliding_layers` as transformers reads them, absent keys included.

        A window that the context fits into is none.
        """
        kinds = self._layer_types(num_layers)
        if architecture == "mistral":
            # One switch for all layers: a window, or null. transformers ignores layer_types here.
            slides, first = self.value("sliding_window") is not None or "sliding_window" not in self._document, 0
            if kinds is not None and kinds != [_SLIDING if slides else _FULL] * num_layers:
                raise self._unsupported("layer_types", "and sliding_window say different things")
        else:
            slides = architecture in ("qwen2", "qwen3") and self._boolean("use_sliding_window")
            slides = slides and (self.value("sliding_window") is not None or "sliding_window" not in self._document)
            first = self._integer("max_window_layers", 28, least=0) if slides else 0
        if not slides:
            if kinds is not None and _SLIDING in kinds:
                raise self._unsupported("layer_types", f"names {_SLIDING}, and no sliding window is in use")
            return {}
        window = self._integer("sliding_window", 4096)
        if kinds is None:
            kinds = [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
        return {"sliding_window": window, "sliding_layers": layers} if layers and window < context_length else {}

    def _layer_types(self, num_layers: int) -> list[str] | None:
        kinds: Any = self.value("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or any(kind not in (_FULL, _SLIDING) for kind in cast("list[Any]", kinds)):
            raise self._unsupported("layer_types", f"names others than {_FULL} and {_SLIDING}")
        named = cast("list[str]", kinds)
        if len(named) != num_layers:
            raise self._damaged("layer_types", f"names {len(named)} layers of {num_layers}")
        return named

    def _refuse_unsupported(self) -> None:
        if self.value("quantization_config"):
            raise self._unsupported("quantization_config", "is set; give a model that is not quantised")
        if self.value("hidden_act") not in (None, "silu", "swish"):
            raise self._unsupported("hidden_act", f"is {self.value('hidden_act')!r}; only silu is computed")

    def _integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value: Any = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_INTEGER:
            kind = "a positive integer" if least else "an integer of at least 0"
            raise self._damaged(key, f"should be {kind}, not {value!r}")
        return value

    def _number(self, fields: dict[str, Any], key: str, default: float | None = None) -> float:
        value: Any = fields.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._damaged(key, f"should be a positive number, not {value!r}")
        return float(value)

    def _boolean(self, key: str) -> bool:
        value: Any = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self._damaged(key, f"should be true or false, not {value!r}")
        return bool(value)

    def _damaged(self, key: str, why: str) -> ModelDamaged:
        return ModelDamaged(f"{self._path}: {key} {why}. Download the file again, or correct it.")

    def _unsupported(self, key: str, why: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self._path}: {key} {why}. Serve another model.")
