"""Values that a model writes without JSON, as JSON of the type that the parameter's schema asks for."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

_TEXT_TYPES: Final = frozenset({"string", "str", "text", "varchar", "char", "enum"})
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,64}")
# Deeper or longer than any argument by hand; `ast.literal_eval` may take a stack of C frames for each level.
_LITERAL_LIMIT: Final = 4096


def is_text(schema: Any) -> bool:
    """Whether every value is a string as it stands, so that it can go out before its end is seen."""
    return _types(schema) <= _TEXT_TYPES


def text_of(raw: str) -> str:
    """`raw` inside a JSON string; of pieces of a text, the pieces of the string."""
    return json.dumps(raw, ensure_ascii=False)[1:-1]


def json_of(raw: str, schema: Any) -> str:
    """`raw` as JSON text: as it stands if it is JSON of a type asked for, else as near as it gets, else a string."""
    types = _types(schema)
    blank = raw.strip()
    if blank.lower() in ("null", "none") and ("null" in types or not types & _TEXT_TYPES):
        return "null"
    value = _typed(blank, types - _TEXT_TYPES - {"null"})
    return json.dumps(raw, ensure_ascii=False) if value is None else value


def _typed(blank: str, types: set[str]) -> str | None:
    for kind in sorted(types):
        if kind.startswith(("int", "uint", "long", "short", "unsigned")):
            if _INTEGER.fullmatch(blank):
                return str(int(blank))
        elif kind.startswith(("num", "float", "double")):
            if (number := _parsed(blank)) is not None and type(number) in (int, float):
                return blank
        elif kind in ("boolean", "bool", "binary"):
            if blank.lower() in ("true", "false"):
                return blank.lower()
        elif isinstance(_parsed(blank), dict | list):
            return blank
        elif (literal := _python_literal(blank)) is not None:
            return literal
    return None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda _: None)
    # A number of too many digits is a ValueError, too many brackets a RecursionError: neither is JSON to a client.
    except (ValueError, RecursionError):
        return None


def _python_literal(text: str) -> str | None:
    """What Python's own notation of a container says, which some models write."""
    if len(text) > _LITERAL_LIMIT or not text.startswith(("{", "[", "(")):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _types(schema: Any) -> set[str]:
    """The types that a schema names; "string" if it is silent, "object" if it points elsewhere."""
    if not isinstance(schema, Mapping):
        return {"string"}
    names = cast("Mapping[str, Any]", schema)
    kind = names.get("type")
    if isinstance(kind, str):
        return {kind.strip().lower()}
    if isinstance(kind, list):
        return {str(one).strip().lower() for one in cast("list[Any]", kind)}
    found: set[str] = set()
    for union in ("anyOf", "oneOf", "allOf"):
        options = names.get(union)
        if isinstance(options, list):
            for option in cast("list[Any]", options):
                found |= _types(option)
    choices = names.get("enum")
    if isinstance(choices, list) and not found:
        found = {_type_of(choice) for choice in cast("list[Any]", choices)}
    return found or ({"object"} if "$ref" in names else {"string"})


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds: dict[str, str] = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}
    return kinds.get(type(cast("object", value)).__name__, "object")
