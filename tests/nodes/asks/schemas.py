"""JSON schemas drawn at random, of which every text is short: free strings and numbers would run to any length."""

import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LEAVES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 30, "multipleOf": 3},
        {"type": "string", "maxLength": 6},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}(-[0-9]{2})?$"},
        {"type": "string", "format": "date"},
        {"enum": ["a", 1, None, {"b": [True]}]},
        {"const": 'é\n"x"'},
        {"type": ["boolean", "null"], "description": "either"},
    ]
)
NAMES = st.lists(
    st.sampled_from(["a", "b", "title", "default", "$ref", 'with "quotes" and é']), unique=True, max_size=4
)


def composed(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda one, least, more: {"type": "array", "items": one, "minItems": least, "maxItems": least + more},
        parts,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(parts, min_size=1, max_size=3).map(
        lambda ones: {"type": "array", "prefixItems": ones, "items": False, "minItems": len(ones)}
    )
    objects = NAMES.flatmap(
        lambda names: st.builds(
            lambda values, num: {
                "type": "object",
                "title": "T",
                "properties": dict(zip(names, values, strict=True)),
                "required": names[:num],
                "additionalProperties": False,
            },
            st.lists(parts, min_size=len(names), max_size=len(names)),
            st.integers(0, len(names)),
        )
    )
    either = st.lists(parts, min_size=1, max_size=3).map(lambda ones: {"anyOf": ones})
    return st.one_of(arrays, tuples, objects, either)


PLAIN = st.recursive(LEAVES, composed, max_leaves=6)
SHARED = PLAIN.map(lambda one: {"$defs": {"d": one}, "anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]})
BOUNDED = PLAIN | SHARED


def drawn(num: int) -> list[dict[str, Any]]:
    """So many of `BOUNDED`, the same each time."""
    found: list[dict[str, Any]] = []

    @settings(max_examples=num, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(BOUNDED)
    def draw(schema: dict[str, Any]) -> None:
        found.append(schema)

    draw()
    return found


def check(schema: dict[str, Any], text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
