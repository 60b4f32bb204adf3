"""Numbers of a JSON schema as llguidance can hold them: it reads doubles, of integers' bounds 64 bits, and counts as
integers without a fraction.

Without this it would draw 9007199254740992 where a schema says 9007199254740993, and refuse two items at most where it
says 2.0.
"""

import math
from typing import Any, Final, TypeGuard

Schema = dict[str, Any]

_EXACT: Final = 2**53
"""Every integer up to here is a double."""
_MOST: Final = 2**63 - 1024
"""The largest double within 64 bits; the library refuses the smallest 64-bit integer as a bound, or crashes of it."""

_MOST_COUNTED: Final = 2**31
"""More than any answer has of anything."""
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


class NumberTooLarge(ValueError):
    """An integer of a schema that could not be enforced."""


def fit_numbers(schema: Schema) -> None:
    """Change the bounds and counts of this schema, not of those in it, to such that allow no more and can be held.

    Raises NumberTooLarge if there are none, or if a value is no double.
    """
    values: list[Any] = [schema.get("const"), schema.get("enum")]
    # Not by recursion: clients choose how deep it is.
    while values:
        one = values.pop()
        if isinstance(one, dict):
            values.extend(one.values())  # pyright: ignore[reportUnknownArgumentType] - of JSON
        elif isinstance(one, list):
            values.extend(one)  # pyright: ignore[reportUnknownArgumentType] - of JSON
        elif isinstance(one, int) and _is_large(one) and (abs(one) > _MOST or int(float(one)) != one):
            raise NumberTooLarge(f"the integer {str(one)[:40]} is no double")
    _fit(schema, "minimum", 1)
    _fit(schema, "maximum", -1)
    for name in _COUNTS:
        if name in schema:
            schema[name] = _counted(schema[name])


def _counted(count: Any) -> Any:
    """2.0 is an integer to JSON Schema (6.1); "2" is what protobuf's JSON makes of one, and OpenAI takes it."""
    if isinstance(count, str) and count.isascii() and count.isdigit() and len(count) < len(str(_MOST_COUNTED)):
        return int(count)
    return int(count) if isinstance(count, float) and count.is_integer() and 0 <= count < _MOST_COUNTED else count


def _fit(schema: Schema, bound: str, inwards: int) -> None:
    """`inwards`: 1 or -1, the direction in which a bound allows less."""
    exclusive = f"exclusive{bound.capitalize()}"
    beyond, one = schema.get(exclusive), schema.get(bound)
    if _is_large(beyond):
        del schema[exclusive]
        nearest = int(beyond) + inwards
        one = max(one * inwards, nearest * inwards) * inwards if isinstance(one, int | float) else nearest
        schema[bound] = one
    if not _is_large(one):
        return
    if one * inwards > _MOST:
        raise NumberTooLarge(f"'{bound}' is {str(one)[:40]}, beyond 64 bits")
    wanted = max(-_MOST, min(int(one), _MOST))
    held = float(wanted)
    if (int(held) - wanted) * inwards < 0:
        held = math.nextafter(held, inwards * math.inf)
    schema[bound] = int(held)


def _is_large(one: Any) -> TypeGuard[int | float]:
    return isinstance(one, int | float) and not isinstance(one, bool) and abs(one) >= _EXACT
