"""`meshctl kv ...`"""

from typing import Annotated

import typer

from cli.arguments.options import NameOption, OutputOption, commands, example

app = commands("kv", "Look at KV pages on disk, and forget them.", "meshctl kv ls")


@app.command("ls", epilog=example("meshctl kv ls"))
def ls(name: NameOption = "default", output: OutputOption = "table") -> None:
    """Show the stores of KV pages on disk, of all hosts, also those that no mesh uses."""
    from cli.commands.kv import ls as run

    raise typer.Exit(run(name, output))


@app.command("stats", epilog=example("meshctl kv stats -o json"))
def stats(name: NameOption = "default", output: OutputOption = "table") -> None:
    """Show what stores gave and took: hits, rates, pages not stored and why, how the disk is written."""
    from cli.commands.kv import stats as run

    raise typer.Exit(run(name, output))


@app.command("why", epilog=example("meshctl kv why"))
def why(
    request: Annotated[
        str, typer.Argument(metavar="[REQUEST]", help="A request's id, its X-Request-Id, traceparent or trace id.")
    ] = "",
    name: NameOption = "default",
    output: OutputOption = "table",
) -> None:
    """Show what became of a prompt's pages: cached, read from the disk, or computed and why; default: the last one."""
    from cli.commands.kv import why as run

    raise typer.Exit(run(name, request, output))


@app.command("flush", epilog=example("meshctl kv flush --yes"))
def flush(
    stores: Annotated[
        list[str] | None, typer.Argument(metavar="STORE...", help="Such as kv-1f..., as in `kv ls`; all if left out.")
    ] = None,
    name: NameOption = "default",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether it is wanted.")] = False,
    output: OutputOption = "table",
) -> None:
    """Forget all pages on disk; pools keep theirs. What was read or stored just now is computed instead."""
    from cli.commands.kv import flush as run

    raise typer.Exit(run(name, stores or [], yes=yes, output=output))
