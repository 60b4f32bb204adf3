"""Whether a version is within a range, as far as `pyproject.toml` writes ranges. Pure."""

import re
from typing import Final

_NUMBER: Final = re.compile(r"\d+")
_PART: Final = re.compile(r"(>=|<=|==|!=|>|<)\s*([\w.+*]+)")


def satisfies(version: str, wanted: str) -> bool:
    """Whether `version` is in the range `wanted`, such as `>=0.34,<0.55`. By release numbers: `2.9.0+cu128` is 2.9.

    Parts of a range in a form that is not known here are not checked.
    """
    have = release(version)
    for operator, bound in _PART.findall(wanted):
        limit = release(bound)
        size = max(len(have), len(limit))
        left, right = (numbers + (0,) * (size - len(numbers)) for numbers in (have, limit))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            ">": left > right,
            "<": left < right,
        }
        if not holds[operator]:
            return False
    return True


def release(version: str) -> tuple[int, ...]:
    """The numbers of a release: `2.9.0+cu128` is (2, 9, 0), `1.0rc1` is (1, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        found = _NUMBER.match(part)
        if found is None:
            break
        numbers.append(int(found[0]))
        if found[0] != part:
            break
    return tuple(numbers)
