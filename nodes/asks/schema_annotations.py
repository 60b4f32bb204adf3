"""Cuts from a JSON schema what constrains nothing, before it travels with each attempt of a request, and fits numbers.

Descriptions are often most of a schema that a program wrote. A property may be called `title` as well, so a word is an
annotation only where a schema stands, and what no keyword here says to be a schema is left as it is.
"""

from typing import Any, Final

from nodes.asks.schema_numbers import Schema, fit_numbers

_CUT: Final = frozenset(
    {
        "title",
        "description",
        "examples",
        "example",
        "default",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        # llguidance's own options: which whitespace is allowed is the server's decision.
        "x-guidance",
    }
)
_ONE: Final = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_MANY: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_BY_NAME: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
MAX_SCHEMAS: Final = 32_768
"""A schema takes at least two bytes, and 64 KiB are sent. Looking at so many takes a gateway 50 ms."""


class TooManySchemas(ValueError):
    """There are more than `MAX_SCHEMAS` schemas in a schema."""


def without_annotations(schema: Schema) -> Schema:
    """A copy without annotations; the order of properties is kept, since it is the order of what is drawn.

    Raises TooManySchemas, NumberTooLarge.
    """
    whole: Schema = {}
    left = [(schema, whole)]
    num_seen = 0

    def copied(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        copy: Schema = {}
        left.append((one, copy))  # pyright: ignore[reportUnknownArgumentType] - of JSON, its keys are texts
        return copy

    # Not by recursion: clients choose how deep it is.
    while left:
        source, copy = left.pop()
        num_seen += 1
        if num_seen + len(left) > MAX_SCHEMAS:
            raise TooManySchemas
        for key, value in source.items():
            # Go's structs have null where a keyword is not given (`"required": null`); only a constant may be null.
            if key in _CUT or (value is None and key != "const"):
                continue
            if key in _BY_NAME and isinstance(value, dict):
                copy[key] = {name: copied(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
            elif key in _MANY and isinstance(value, list):
                copy[key] = [copied(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
            else:
                copy[key] = copied(value) if key in _ONE else value
        fit_numbers(copy)
    return whole
