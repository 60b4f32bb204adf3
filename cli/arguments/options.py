"""Options that several commands share, and the example that each command's help ends with."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import typer

Output = Literal["table", "json"]

HELP_NAMES: Final = ["-h", "--help"]

_NAME_HELP: Final = "Which mesh; several can live on a host."

NameOption = Annotated[str, typer.Option("--name", metavar="MESH", envvar="KVMESH_NAME", help=_NAME_HELP)]
NamesOption = Annotated[
    str | None, typer.Option("--name", metavar="MESH", envvar="KVMESH_NAME", help="Which mesh; all if left out.")
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table or json")]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", envvar="KVMESH_TOPOLOGY", help="Topology file (TOML).")
]
ChatTemplateOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Chat template (jinja) to use instead of the model's own.")
]
PoolingOption = Annotated[
    str | None,
    typer.Option(help="How vectors are made: last, mean or cls, with `,normalize`, or yes_no; default: by the model."),
]
FileArgument = Annotated[Path | None, typer.Argument(metavar="FILE", help="Topology file (TOML), as with --file.")]
ActorsArgument = Annotated[list[str], typer.Argument(metavar="ACTOR...", help="Actor ids as in ps, or roles.")]
GroupsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="GROUP...", help="Such as decode-0; all if left out.")
]


def commands(name: str | None = None, about: str | None = None, line: str = "") -> typer.Typer:
    """Commands of `meshctl` itself, or with a name those behind it: what they are `about`, an example's line."""
    return typer.Typer(
        name=name,
        help=about,
        epilog=example(line),
        no_args_is_help=name is not None,
        add_completion=False,
        context_settings={"help_option_names": HELP_NAMES},
    )


def with_options(options: Iterable[Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these options in the place of its `**options`."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        taken = signature(command)
        own = [one for one in taken.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        # Not by assignment: a function has no such attribute until it is given one, and type checkers say so.
        setattr(command, "__signature__", taken.replace(parameters=[*own, *options]))  # noqa: B010
        return command

    return decorated


def options_of(kind: type[Any]) -> Iterator[Parameter]:
    """An option for each field of a dataclass, as its annotation says."""
    types = get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        kept = Parameter.KEYWORD_ONLY
        yield Parameter(one.name, kept, default=one.default, annotation=types[one.name])


def example(line: str) -> str:
    """The last line of a command's help. `tests/process/test_first_hour.py` runs what it says."""
    return f"Example: {line}"
