"""The rotary embedding of a `config.json`, read as transformers 5 reads what any release of it has written.

`rope_parameters` is its own name for it, `rope_scaling` beside `rope_theta` the older one, which wins where both are;
`type` was once the name of `rope_type`.
"""

import math
from typing import Any, Final, NamedTuple, cast

from nodes.models.config_fields import MAX_INTEGER, ConfigFields
from nodes.models.errors import ModelDamaged
from nodes.models.spec import RopeParameters

_KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_MIN_TURNS: Final = 1e-9
"""Far from any model's (32 and 1): their logarithms are taken, and that of 0 or infinity is no number."""
_STRETCHED: Final = {"yarn": "YaRN", "linear": "linear RoPE", "dynamic": "dynamic RoPE"}
"""Kinds whose factor tells how much longer a sequence may be; the factors of others are within the context that
`max_position_embeddings` says."""


class LayerKind(NamedTuple):
    """Layers whose rotary embedding has an entry `name` of its own, its base otherwise in the field `theta_key`."""

    name: str
    theta_key: str
    default_theta: float


def read_rope(config: ConfigFields, head_dim: int, kind: LayerKind | None = None) -> RopeParameters:
    """The rotary embedding, of layers of `kind` if layers differ. Raises ModelDamaged or ModelUnsupported."""
    rope = config.part(_shared_fields(config) if kind is None else _fields_of_kind(config, kind.name))
    if any(isinstance(value, dict) for value in rope.document.values()):
        raise config.unsupported("rope_parameters", "differ between layers")
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise config.unsupported("partial_rotary_factor", "is not 1")
    theta_key, default_theta = (kind.theta_key, kind.default_theta) if kind else ("rope_theta", 10_000.0)
    theta = rope.number("rope_theta", config.number(theta_key, default_theta))
    name: Any = rope.document.get("rope_type", rope.document.get("type", "default"))
    if name not in _KINDS:
        raise config.unsupported("rope_type", f"is {name!r}; supported are {', '.join(_KINDS)}")
    plain = RopeParameters(theta=theta)
    if name == "default":
        return plain
    if name == "linear":
        return RopeParameters(rope_type="linear", theta=theta, factor=rope.number("factor"))
    if name == "dynamic":
        return _dynamic(rope, theta, head_dim)
    # transformers prefers the one beside, unless layers differ.
    beside = config.value("original_max_position_embeddings") if kind is None else None
    given = rope if beside is None else config
    original = given.number("original_max_position_embeddings", config.context_length)
    if not 1 <= original < MAX_INTEGER:
        raise config.damaged("original_max_position_embeddings", f"should be a positive integer, not {original!r}")
    read = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}[name]
    return read(rope, theta, int(original), config.context_length, head_dim // 2)


def max_context(rope: RopeParameters, context_length: int) -> tuple[int, str]:
    """The longest context that a rotary embedding was made for, as vLLM counts it, and why if it is more than
    `context_length`, which config.json says: `YaRN: 64 × 4`.
    """
    if rope.rope_type not in _STRETCHED:
        return context_length, ""
    original = rope.original_context_length if rope.rope_type == "yarn" else context_length
    most = int(min(original * rope.factor, MAX_INTEGER - 1))
    if most <= context_length:
        return context_length, ""
    return most, f"{_STRETCHED[rope.rope_type]}: {original} × {rope.factor:g}"


def _shared_fields(config: ConfigFields) -> dict[str, Any]:
    rope: Any = config.value("rope_scaling") or config.value("rope_parameters") or {}
    return _object(config, rope)


def _fields_of_kind(config: ConfigFields, kind: str) -> dict[str, Any]:
    """Entries of each kind of layer; what the older name says is about the layers with full attention."""
    both = _object(config, config.value("rope_parameters") or {})
    # That of plain rotation is there already when the older name is read: a `type` in that one is then not looked at.
    own = _object(config, both.get(kind) or {"rope_type": "default"})
    older = config.value("rope_scaling") if kind == "full_attention" else None
    return own | _object(config, older or {})


def _object(config: ConfigFields, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise config.damaged("rope_parameters", "is not an object")
    return cast("dict[str, Any]", value)


def _dynamic(rope: ConfigFields, theta: float, head_dim: int) -> RopeParameters:
    factor = rope.number("factor")
    if head_dim == 2:
        raise rope.unsupported("rope_type", "is 'dynamic' for heads of 2 numbers, of which it has no formula")
    try:
        # bloc97's NTK-aware scaling, once for the longest context: what each call chose by its own length, as in
        # transformers, would rotate a sequence's first pages otherwise than those that follow.
        longest = theta * (factor * factor - (factor - 1)) ** (head_dim / (head_dim - 2))
    except OverflowError:
        longest = math.inf
    if longest == math.inf:
        raise rope.damaged("factor", f"is {factor:g}, more than can be computed with")
    return RopeParameters(rope_type="dynamic", theta=theta, factor=factor, longest_theta=longest)


def _llama3(rope: ConfigFields, theta: float, original: int, _context: int, _pairs: int) -> RopeParameters:
    return RopeParameters(
        rope_type="llama3",
        theta=theta,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context_length=original,
    )


def _yarn(rope: ConfigFields, theta: float, original: int, context: int, _pairs: int) -> RopeParameters:
    # transformers takes the ratio only for a factor that is there and null.
    is_null = "factor" in rope.document and rope.value("factor") is None
    factor, truncate = context / original if is_null else rope.number("factor"), rope.document.get("truncate", True)
    if not isinstance(truncate, bool):
        raise rope.damaged("truncate", f"should be true or false, not {truncate!r}")
    if theta == 1:
        raise rope.damaged("rope_theta", "is 1, by which all pairs turn alike and YaRN cannot tell them apart")

    def strength(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = rope.value("mscale") and rope.value("mscale_all_dim")
    own = strength(rope.number("mscale")) / strength(rope.number("mscale_all_dim")) if both else strength(1.0)
    if not 0 < own < math.inf:
        raise rope.damaged("mscale", "and mscale_all_dim are more than can be computed with")
    # As in transformers, 0 is as good as nothing.
    fast, slow = (
        rope.number(key) if rope.value(key) else usual for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if not all(_MIN_TURNS < turns < 1 / _MIN_TURNS for turns in (fast, slow)):
        raise rope.damaged("beta_fast", "or beta_slow is no number of turns that a pair can make")
    return RopeParameters(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_context_length=original,
        attention_factor=rope.number("attention_factor", own),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )


def _longrope(rope: ConfigFields, theta: float, original: int, context: int, pairs: int) -> RopeParameters:
    # Chosen once, by the context that the model has or the user requests (`ModelSpec.within`). If each call chose,
    # as elsewhere, a sequence that grows beyond the original context would have its first pages rotated one way
    # and its later pages another.
    short = _divisors(rope, "short_factor", pairs)
    factor = rope.number("factor", context / original)
    strength = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeParameters(
        rope_type="longrope",
        theta=theta,
        factor=factor,
        original_context_length=original,
        attention_factor=rope.number("attention_factor", strength),
        divisors=_divisors(rope, "long_factor", pairs) if context > original else short,
        short_divisors=short if context > original else (),
    )


def _divisors(rope: ConfigFields, key: str, pairs: int) -> tuple[float, ...]:
    divisors: Any = rope.value(key)
    try:
        found = tuple(rope.part({key: divisor}).number(key) for divisor in cast("list[Any]", divisors))
    except (TypeError, ModelDamaged) as error:
        raise rope.damaged(key, "is not a list of positive numbers") from error
    # Checked here, so that the CLI reports it, not torch when a worker loads shapes that it cannot multiply.
    if len(found) != pairs:
        raise rope.damaged(key, f"must have one factor for each of the {pairs} pairs of a head")
    return found
