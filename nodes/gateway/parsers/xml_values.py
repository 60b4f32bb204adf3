"""Values that a model writes without JSON, as JSON of the type that the parameter's schema asks for. Pure.

Whatever is made here is JSON to the strictest reader: no NaN, no Infinity.
"""

import ast
import json
import math
import re
from collections.abc import Set as AbstractSet
from typing import Any, Final, NoReturn

from nodes.gateway.parsers.parameters import TEXT_TYPES, Allowed

# What the grammar of a text knows as well, not all that Unicode has.
_BLANK: Final = " \t\r\n\f\v"
# JSON as it stands, of as many digits as Python's own reader takes.
_JSON_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,4299})")
# Of so few digits that it can be written out.
_NUMBER: Final = re.compile(r"\+?(-?)([0-9]{0,64})(?:\.([0-9]{0,64}))?(?:[eE]([-+]?[0-9]{1,2}))?")
# Deeper or longer than any argument by hand; `ast.literal_eval` may take a stack of C frames for each level.
_LITERAL_LIMIT: Final = 4096
_INTEGER_WORDS: Final = ("int", "uint", "long", "short", "unsigned")
_NUMBER_WORDS: Final = ("num", "float", "double")
_BOOLEAN_WORDS: Final = ("boolean", "bool", "binary")


def name_of(raw: str) -> str:
    """A name without the quotes and blanks that some models write around it."""
    name = raw.strip()
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'" else name


def text_of(raw: str) -> str:
    """`raw` inside a JSON string; of pieces of a text, the pieces of the string."""
    return json.dumps(raw, ensure_ascii=False)[1:-1]


def json_of(raw: str, allowed: Allowed) -> str:
    """`raw` as JSON text: as it stands if it is JSON that is allowed, else as near as it gets, else a string."""
    blank, kinds = raw.strip(_BLANK), _kinds(allowed)
    exact = _exactly(blank, kinds)
    if exact is not None and _is_allowed(json.loads(exact), allowed):
        return exact
    if allowed.texts is not None:
        if (text := next((one for one in (raw, blank) if one in allowed.texts), None)) is not None:
            return json.dumps(text, ensure_ascii=False)
    elif allowed.types & TEXT_TYPES:
        # What a text may be as well is taken for something else only as Python writes it.
        found = _as_python(blank, kinds)
        is_other = found is not None and _is_allowed(json.loads(found), allowed)
        return found if found is not None and is_other else json.dumps(raw, ensure_ascii=False)
    found = exact or _nearly(blank, kinds)
    return json.dumps(raw, ensure_ascii=False) if found is None else found


def is_exact(raw: str, allowed: Allowed) -> bool:
    """Whether this is JSON as it stands, where no text may be."""
    return not allowed.types & TEXT_TYPES and _exactly(raw.strip(_BLANK), _kinds(allowed)) is not None


def _kinds(allowed: Allowed) -> frozenset[str]:
    """What values may be if they are no text; what clients call a type is known by how it begins."""
    return frozenset(
        "integer" if word.startswith(_INTEGER_WORDS)
        else "number" if word.startswith(_NUMBER_WORDS)
        else "boolean" if word in _BOOLEAN_WORDS
        else "null" if word == "null"
        else "container"
        for word in allowed.types - TEXT_TYPES
    )  # fmt: skip


def _is_allowed(value: Any, allowed: Allowed) -> bool:
    if allowed.others is None:
        return True
    # To Python 1 is True.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed.others)


def _exactly(blank: str, kinds: AbstractSet[str]) -> str | None:
    """`blank` if it is JSON of one of these kinds."""
    if "integer" in kinds and _JSON_INTEGER.fullmatch(blank):
        return blank
    if not blank or not kinds:
        return None
    value = _parsed(blank)
    kind = (
        "null" if blank == "null"
        else "boolean" if isinstance(value, bool)
        else "number" if isinstance(value, int | float)
        else "container" if isinstance(value, dict | list)
        else ""
    )  # fmt: skip
    return blank if kind in kinds else None


def _parsed(text: str, *, strict: bool = True) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, strict=strict)
    # A number of too many digits is a ValueError, too many brackets a RecursionError: neither is JSON to a client.
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _as_python(blank: str, kinds: AbstractSet[str]) -> str | None:
    """What Python's own notation says, which some models write: None, True, containers."""
    word = blank.lower()
    if "null" in kinds and word in ("null", "none"):
        return "null"
    if "boolean" in kinds and word in ("true", "false"):
        return word
    if "container" not in kinds or len(blank) > _LITERAL_LIMIT or not blank.startswith(("{", "[", "(")):
        return None
    try:
        # In ASCII: half of a surrogate pair, which Python writes by its number, is no text to a client otherwise.
        return json.dumps(ast.literal_eval(blank), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _nearly(blank: str, kinds: AbstractSet[str]) -> str | None:
    """What was meant, where no text may be."""
    if (found := _as_python(blank, kinds | {"null"})) is not None:
        return found
    if kinds & {"integer", "number"} and (number := _number(blank, kinds)) is not None:
        return number
    # Line ends within strings, as models write them.
    if "container" in kinds and isinstance(value := _parsed(blank, strict=False), dict | list):
        return json.dumps(value)
    inner: Any = _parsed(blank) if blank.startswith('"') else None
    if isinstance(inner, str) and not inner.lstrip().startswith('"'):
        return _exactly(inner.strip(), kinds) or _nearly(inner.strip(), kinds)
    return None


def _number(blank: str, kinds: AbstractSet[str]) -> str | None:
    """A number that is not written as JSON, or not as an integer."""
    found = _NUMBER.fullmatch(blank)
    if not found or not (found[2] or found[3]):
        return None
    sign, whole, fraction, exponent = found[1], found[2], found[3] or "", int(found[4] or 0)
    digits, scale = int(whole + fraction), 10 ** abs(exponent - len(fraction))
    is_whole = exponent >= len(fraction) or digits % scale == 0
    if is_whole and ("integer" in kinds or found[3] is found[4] is None):
        magnitude = digits * scale if exponent >= len(fraction) else digits // scale
        return f"{sign if magnitude else ''}{magnitude}"
    value = float(blank)
    return json.dumps(value) if math.isfinite(value) else None
