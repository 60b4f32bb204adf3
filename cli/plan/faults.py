"""What is wrong with plain data that should become a struct, in words for the person who typed it. Pure.

msgspec finds the fault and names types and patterns; people want the setting, what it is now, and what it may be.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec import inspect

_MAX_SHOWN: Final = 80
"""One line of a terminal, beside the setting's name."""


class Fault(NamedTuple):
    """One thing that is wrong: `why`, and what to `do` about it."""

    why: str
    do: str


def find_fault(value: Any, expected: Any, path: str = "", *, strict: bool) -> Fault | None:
    """The first thing in `value` that keeps it from becoming `expected`; None if nothing does.

    With `strict` False strings may stand for numbers, as in the environment. `path` names the value.
    """
    if isinstance(expected, type) and issubclass(expected, msgspec.Struct) and isinstance(value, Mapping):
        return _fault_of_fields(cast("Mapping[str, Any]", value), expected, path, strict=strict)
    try:
        msgspec.convert(value, type=cast("Any", expected), strict=strict)
    except msgspec.ValidationError as error:
        words, examples = _words(expected), _examples(inspect.type_info(expected))
        do = f"write it like {', '.join(examples)}" if examples else "correct it"
        return Fault(f"{path or 'it'} is {_shown(value)}, but must be {words or error}", do)
    except ValueError as error:
        return Fault(str(error), "correct it")
    return None


def unknown_name(name: str, known: Iterable[str], what: str) -> Fault:
    """The fault that `name` is none of `known`; suggests the most likely one, or all of them."""
    # A name may be several things at once, such as an actor and a role.
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=1)
    do = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(names)}"
    return Fault(f"there is no {what} {name}", do)


def _fault_of_fields(
    value: Mapping[str, Any], expected: type[msgspec.Struct], path: str, *, strict: bool
) -> Fault | None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(expected)}
    for key, inner in value.items():
        inner_path = f"{path}.{key}" if path else key
        if key not in fields:
            return unknown_name(inner_path, (f"{path}.{name}" if path else name for name in fields), "setting")
        fault = find_fault(inner, fields[key].type, inner_path, strict=strict)
        if fault is not None:
            return fault
    return None


def _words(expected: Any) -> str:
    return _type_words(inspect.type_info(expected))


def _examples(info: inspect.Type) -> list[str]:
    """Values that it might have instead, if the type names any."""
    if isinstance(info, inspect.UnionType):
        return [example for one in info.types for example in _examples(one)]
    schema = cast("dict[str, Any]", info.extra_json_schema or {}) if isinstance(info, inspect.Metadata) else {}
    return schema.get("examples", [])


def _type_words(info: inspect.Type) -> str:
    """What a value has to be; empty if only msgspec knows."""
    match info:
        case inspect.Metadata():
            schema = cast("dict[str, Any]", info.extra_json_schema or {})
            # Types with a pattern say in words what it allows.
            return str(schema["description"]) if "description" in schema else _type_words(info.type)
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(info, inspect.IntType) else "a number"
            return " ".join(filter(None, (noun, _bounds(info))))
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text" if not info.min_length else "text that is not empty"
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, info.values))}"
        case inspect.UnionType():
            words = [_type_words(kind) for kind in info.types if not isinstance(kind, inspect.NoneType)]
            return " or ".join(words) if all(words) else ""
        case inspect.StructType() | inspect.DictType():
            return "a table"
        case inspect.ListType() | inspect.VarTupleType():
            return "a list"
        case _:
            return ""


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    least = f"{info.ge:,}" if info.ge is not None else None
    most = f"{info.le:,}" if info.le is not None else None
    if least is not None and most is not None:
        return f"from {least} to {most}"
    if least is not None:
        return f"of at least {least}"
    above = f"above {info.gt:,g}" if info.gt is not None else ""
    below = f"of at most {most}" if most is not None else ""
    return " and ".join(filter(None, (above, below)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
