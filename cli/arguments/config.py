"""`meshctl config ...`"""

from typing import Annotated, Literal

import typer

from cli.arguments.options import FileArgument, FileOption, commands, example

app = commands("config", "Show, describe or check the configuration.", "meshctl config validate mesh.toml")

HostOption = Annotated[str | None, typer.Option(metavar="NAME", help="Which host this is, if the file has several.")]
TomlOption = Annotated[Literal["toml", "json"], typer.Option("--output", "-o", help="toml or json")]


@app.command("show", epilog=example("meshctl config show"))
def show(
    path: FileArgument = None, file: FileOption = None, output: TomlOption = "toml", host: HostOption = None
) -> None:
    """The settings in force: defaults, topology file, environment, and what follows from them."""
    from cli.commands.config import show as run

    raise typer.Exit(run(path or file, output, host))


@app.command("validate", epilog=example("meshctl config validate"))
def validate(path: FileArgument = None, file: FileOption = None, host: HostOption = None) -> None:
    """Check the settings in force, the model included, without starting anything."""
    from cli.commands.config import validate as run

    raise typer.Exit(run(path or file, host))


@app.command("schema", epilog=example("meshctl config schema"))
def schema() -> None:
    """JSON Schema of the topology file."""
    from cli.commands.config import schema as run

    raise typer.Exit(run())
