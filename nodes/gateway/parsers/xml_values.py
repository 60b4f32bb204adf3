"""Values that a model writes without JSON, as JSON of the type that the parameter's schema asks for."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

MAX_DEPTH: Final = 8
"""Of unions in unions, which clients choose; what is deeper is silent."""
TEXT_TYPES: Final = frozenset({"string", "str", "text", "varchar", "char", "enum"})
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,64}")
# JSON as it stands, of as many digits as Python's own reader takes.
_JSON_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,4299})")
_KINDS: Final[Mapping[type[Any], str]] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"
}  # fmt: skip
# Deeper or longer than any argument by hand; `ast.literal_eval` may take a stack of C frames for each level.
_LITERAL_LIMIT: Final = 4096


def is_text(schema: Any) -> bool:
    """Whether every value is a string as it stands, so that it can go out before its end is seen."""
    return types_of(schema) <= TEXT_TYPES


def text_of(raw: str) -> str:
    """`raw` inside a JSON string; of pieces of a text, the pieces of the string."""
    return json.dumps(raw, ensure_ascii=False)[1:-1]


def json_of(raw: str, schema: Any) -> str:
    """`raw` as JSON text: as it stands if it is JSON of a type asked for, else as near as it gets, else a string."""
    return json_as(raw, types_of(schema))


def json_as(raw: str, types: set[str]) -> str:
    """The same, by the types asked for."""
    blank = raw.strip()
    if blank.lower() in ("null", "none") and ("null" in types or not types & TEXT_TYPES):
        return "null"
    value = _typed(blank, types - TEXT_TYPES - {"null"})
    return json.dumps(raw, ensure_ascii=False) if value is None else value


def _typed(blank: str, types: set[str]) -> str | None:
    for kind in sorted(types):
        if kind.startswith(("int", "uint", "long", "short", "unsigned")):
            if _JSON_INTEGER.fullmatch(blank):
                return blank
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


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """The types that a schema names; "string" if it is silent, "object" if it points elsewhere."""
    return _named(schema, depth) or ({"object"} if isinstance(schema, Mapping) and "$ref" in schema else {"string"})


def _named(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    names = cast("Mapping[str, Any]", schema)
    kind = names.get("type")
    if isinstance(kind, str):
        return {kind.strip().lower()}
    if isinstance(kind, list):
        return {str(one).strip().lower() for one in cast("list[Any]", kind)}
    found: set[str] = set()
    for union in ("anyOf", "oneOf"):
        options = names.get(union)
        if isinstance(options, list):
            found = found.union(*(types_of(option, depth + 1) for option in cast("list[Any]", options)))
    parts = names.get("allOf")
    # All of it holds: what one part leaves open another one says.
    for part in cast("list[Any]", parts) if isinstance(parts, list) else []:
        also = types_of(part, depth + 1) if isinstance(part, dict) and "$ref" in part else _named(part, depth + 1)
        found = found & also or found | also
    choices = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(choices, list) and not found:
        found = {type_of(choice) for choice in cast("list[Any]", choices)}
    return found


def type_of(value: Any) -> str:
    """The type of a value that JSON says."""
    return _KINDS.get(type(cast("object", value)), "object")
