"""Lines of figures, `figure | name | value | beside | goal`: benchmarks print them, `tools/gpu_check` reads them."""

from typing import Final, NamedTuple

PREFIX: Final = "figure"
_SEPARATOR: Final = " | "


class Figure(NamedTuple):
    """One measured value with its unit; `beside` is the limit or the peer, `goal` the target. All fields are texts."""

    name: str
    value: str
    beside: str = ""
    goal: str = ""


def say(name: str, value: str, beside: str = "", goal: str = "") -> None:
    """Print a figure, flushed at once: the reader may kill this process later."""
    print(_SEPARATOR.join((PREFIX, *Figure(name, value, beside, goal))), flush=True)


def figures_in(text: str) -> list[Figure]:
    """The figures among the lines of an output; others are ignored, and so is a last line that was cut off."""
    found: list[Figure] = []
    for line in text.splitlines():
        prefix, *fields = line.split(_SEPARATOR.rstrip())
        if prefix.strip() == PREFIX and 2 <= len(fields) <= len(Figure._fields):
            found.append(Figure(*(field.strip() for field in fields)))
    return found


def of_limit(value: float, limit: float, what: str, unit: str) -> str:
    """`0.82 of the roofline (281 tok/s)`."""
    return f"{value / limit:.2f} of {what} ({limit:,.4g} {unit})"
