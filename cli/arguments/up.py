"""`meshctl up`: a few options of its own, and one for each setting that words can set (`cli/plan/declared.py`).

Imported only where `up` is run or its help is shown.
"""

import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from cli.arguments.options import FileOption, commands, with_options
from cli.plan.declared import Setting, settings_in
from cli.plan.settings import Settings

app = commands()


def options_of_settings(kind: type[msgspec.Struct]) -> Iterator[inspect.Parameter]:
    """An option for each setting that has one, by the setting's key."""
    return (_option(setting) for setting in settings_in(kind) if setting.option)


def _option(setting: Setting) -> inspect.Parameter:
    words = setting.option
    if setting.default is True:
        words += f"/--no-{words.removeprefix('--')}"
    table = ".".join(setting.path[:-1])
    shown = typer.Option(
        words,
        metavar=setting.shown.metavar or None,
        help=setting.says.partition("\n\n")[0],
        rich_help_panel=f"Settings of {table}" if table else "Settings",
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(setting.key, kind, default=None, annotation=Annotated[setting.word | None, shown])


@app.command()
@with_options(options_of_settings(Settings))
def up(
    *,
    file: FileOption = None,
    join: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Join the mesh that issued this token (`meshctl keys token`).")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="With --join: address that other hosts dial; default: taken from the route.")
    ] = None,
    ports: Annotated[
        str | None,
        typer.Option(help="With --join: ports this host listens on, like 7500-7599; default: any free ones."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the mesh is ready.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands instead of running them.")] = False,
    **options: Any,
) -> None:
    """What `cli/main.py` lists; its help and example are there."""
    from cli.commands.up import up as run

    given = {"address": address, "ports": ports, **options}
    raise typer.Exit(run(file, given, join=join, detach=detach, dry_run=dry_run))
