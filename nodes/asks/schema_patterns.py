"""Patterns of a JSON schema that no automaton matches: those that look around, or back at what a group was.

Zod writes such a pattern for each address of mail, beside its format. Where a client did not ask for `strict`, such a
pattern is ignored like other keywords that cannot be enforced.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, cast

_TOKEN: Final = re.compile(r"\\k<|\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?[=!]|.", re.DOTALL)
"""Classes and escaped characters whole, so that no bracket in them is taken for a group."""
_BEYOND: Final = re.compile(r"\\[1-9]|\\k<|\(\?<?[=!]")


def without_look_around(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, or a copy of it without such patterns."""
    whole: dict[str, Any] = dict(schema)
    left: list[dict[str, Any] | list[Any]] = [whole]

    def copied(one: Any) -> Any:
        if not isinstance(one, dict | list):
            return one
        copy = cast("dict[str, Any] | list[Any]", one).copy()
        left.append(copy)
        return copy

    # Not by recursion: clients choose how deep it is.
    while left:
        one = left.pop()
        if isinstance(one, list):
            one[:] = map(copied, one)
            continue
        if isinstance(pattern := one.get("pattern"), str) and _looks_around(pattern):
            del one["pattern"]
        for key, value in one.items():
            # Values, in which a key means nothing; a property may be called `enum`.
            if key != "const" and (key != "enum" or isinstance(value, dict)):
                one[key] = copied(value)
    return whole


def _looks_around(pattern: str) -> bool:
    return any(map(_BEYOND.fullmatch, _TOKEN.findall(pattern)))
