"""What a setting is: one field of a struct in `cli/plan/settings.py`, and the text below it.

    chunk: Positive | None = None
    Most tokens in one prefill chunk.    <- a docstring: the first paragraph is for `--help`, all of it for the page

From the field come its option `--chunk`, its variable `KVMESH_CHUNK`, its place in the topology file and in the JSON
Schema, its row on the page of settings, and the field of that name in the configuration of each role that has one
(`cli/plan/overrides.py`).
"""

import ast
import inspect
import itertools
import sys
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

ENVIRONMENT_PREFIX: Final = "KVMESH_"
_WITHOUT_OPTIONS: Final = ("supervision",)
"""Tables for the file and the environment: with their names options would be cut off in a terminal of 80 columns."""


class Shown(NamedTuple):
    """Beside a field's type: what stands for its value in `--help`, and its option if the rule gives it a poor name.

    `by_words` False: neither an option nor a variable can set it.
    """

    metavar: str = ""
    option: str = ""
    by_words: bool = True


class Setting(NamedTuple):
    """One field, at `path` in the topology file; `owner` is the struct that declares it."""

    path: tuple[str, ...]
    kind: Any
    default: Any
    owner: type[msgspec.Struct]

    @property
    def key(self) -> str:
        """Its name among options: `kv__pages`."""
        return "__".join(self.path)

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.key.upper()

    @property
    def option(self) -> str:
        """Empty if none sets it."""
        if self.path[0] in _WITHOUT_OPTIONS or not self.is_given_by_words:
            return ""
        return self.shown.option or "--" + "-".join(self.path).replace("_", "-")

    @property
    def shown(self) -> Shown:
        return next((part for part in reversed(parts_of(self.kind)) if isinstance(part, Shown)), Shown())

    @property
    def says(self) -> str:
        """The text below the field; the first paragraph is for `--help`."""
        return said_of(self.owner).get(self.path[-1], "")

    @property
    def word(self) -> Any:
        """The type that an option of it is read as. Bounds are checked later, by the name of their source."""
        parts = parts_of(self.kind)
        if {list, tuple} & {get_origin(part) for part in parts}:
            return list[str]
        return next((word for word in (bool, int, float) if word in parts), str)

    @property
    def is_given_by_words(self) -> bool:
        return self.shown.by_words and dict not in {get_origin(part) for part in parts_of(self.kind)}


@cache
def settings_in(kind: type[msgspec.Struct], path: tuple[str, ...] = ()) -> tuple[Setting, ...]:
    """The fields of a struct and of the tables in it, in their order."""
    found: list[Setting] = []
    for field in msgspec.structs.fields(kind):
        own = (*path, field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found += settings_in(field.type, own)
        else:
            found.append(Setting(own, field.type, field.default, kind))
    return tuple(found)


@cache
def said_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text below each field of a struct that has one, its bases' included."""
    said: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if base not in msgspec.Struct.__mro__]):
        body = next(node.body for node in _classes(base.__module__) if node.name == base.__name__)
        for field, below in itertools.pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    said[name] = inspect.cleandoc(text)
                case _:
                    pass
    return said


@cache
def _classes(module: str) -> list[ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def parts_of(kind: Any) -> list[Any]:
    """The types in a union, literals by their values' types, and what stands beside them, last what is outermost."""
    if get_origin(kind) is Annotated:
        inner, *beside = get_args(kind)
        return [*parts_of(inner), *beside]
    if get_origin(kind) is Literal:
        return [type(value) for value in get_args(kind)]
    if get_origin(kind) in (Union, UnionType):
        return [part for one in get_args(kind) for part in parts_of(one)]
    return [kind]
