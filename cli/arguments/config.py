"""`meshctl config ...`"""

from typing import Annotated, Literal

import typer

from cli.arguments.options import FileArgument, FileOption, commands, example

app = commands()

TomlOption = Annotated[Literal["toml", "json"], typer.Option("--output", "-o", help="toml or json")]


@app.command("show", epilog=example("meshctl config show"))
def show(path: FileArgument = None, file: FileOption = None, output: TomlOption = "toml") -> None:
    """The settings in force: defaults, topology file, environment, and what follows from them."""
    from cli.commands.config import show as run

    raise typer.Exit(run(path or file, output))


@app.command("validate", epilog=example("meshctl config validate"))
def validate(path: FileArgument = None, file: FileOption = None) -> None:
    """Check the settings in force, the model included, without starting anything."""
    from cli.commands.config import validate as run

    raise typer.Exit(run(path or file))


@app.command("schema", epilog=example("meshctl config schema"))
def schema() -> None:
    """JSON Schema of the topology file."""
    from cli.commands.config import schema as run

    raise typer.Exit(run())
