"""Objects that other packages install: entry points of a group, each a callable that makes one."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

Made = TypeVar("Made")


def installed(group: str) -> list[str]:
    """Names of the entry points of `group`, in order."""
    return sorted({point.name for point in entry_points(group=group)})


def make_installed(
    group: str, name: str, context: Any, kind: type[Made], what: str, error: Callable[[str], Exception]
) -> Made:
    """What the entry point `name` makes of `context`. May block for as long as the package likes.

    Raises `error` with a sentence that calls it `what`: none of that name, one that raises, or makes no `kind`.
    """
    for point in entry_points(group=group, name=name):
        try:
            made = point.load()(context)
        # A stranger's package may raise anything, and its name in the message helps more than a traceback.
        except Exception as problem:
            why = f"{point.value} raised {type(problem).__name__}: {problem}"
            raise error(f"the {what} {name} cannot be made: {why}") from problem
        if isinstance(made, kind):
            return made
        # A class that only looks like one would fail at its first call, in the middle of a request.
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        why = f"{point.value} returned {type(made).__name__}, which is not {article} {kind.__name__}"
        raise error(f"the {what} {name} cannot be used: {why}")
    have = ", ".join(installed(group)) or "none"
    raise error(f"no {what} {name} is installed (entry points of {group}: {have})")
