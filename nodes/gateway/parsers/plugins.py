"""Parsers installed by other packages: entry points of the group `kvmesh.parsers`.

An entry point's name is what the model's flags say; the callable that it points to gets the tools offered and the end
of the rendered prompt when a sample begins, and returns a `Parser`. Its attribute `marks`, if it has one, names the
marks that must not be left out of the text.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final, TypeAlias, cast

from nodes.gateway.parsers.calls import OfferedTools
from nodes.gateway.parsers.stage import Parser

GROUP: Final = "kvmesh.parsers"
ParserMaker: TypeAlias = Callable[[OfferedTools, str], Parser]


class ParserUnusable(Exception):
    """A parser that a flag names is not there, or cannot be made."""


def installed_parsers() -> list[str]:
    """Names of the parsers installed by other packages."""
    return sorted({point.name for point in entry_points(group=GROUP)})


@cache
def load_maker(name: str) -> ParserMaker:
    """The installed parser of this name, loaded once. Raises ParserUnusable."""
    for point in entry_points(group=GROUP, name=name):
        try:
            maker: Any = point.load()
        # A stranger's package may raise anything, and its name in the message helps more than a traceback.
        except Exception as error:
            why = f"{point.value} raised {type(error).__name__}: {error}"
            raise ParserUnusable(f"the parser {name} cannot be loaded: {why}") from error
        if not callable(cast("object", maker)):
            raise ParserUnusable(f"the parser {name} cannot be used: {point.value} is not callable")
        return maker
    have = ", ".join(installed_parsers()) or "none"
    raise ParserUnusable(f"no parser {name} is built in or installed (entry points of {GROUP}: {have})")


def make_installed(name: str, tools: OfferedTools, prompt_tail: str) -> Parser:
    """A parser for one sample, by an installed maker. Raises ParserUnusable."""
    try:
        parser: Any = load_maker(name)(tools, prompt_tail)
    except ParserUnusable:
        raise
    # As above.
    except Exception as error:
        raise ParserUnusable(f"the parser {name} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(parser, Parser):
        raise ParserUnusable(f"the parser {name} cannot be used: it made a {type(parser).__name__}, not a Parser")
    return parser
