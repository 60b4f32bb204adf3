"""The command line: `meshctl`.

The options of `run` are in `cli/commands/run.py`, those of the other commands in `cli/arguments/`. The commands
themselves are in `cli/commands/`, each imported when run. Data goes to stdout, progress and errors to stderr; exit
codes are those of `cli/exit_codes.py`.
"""

import sys
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typing_extensions import override

from cli.arguments import bench, config, control, keys, kv, look
from cli.arguments.options import HELP_NAMES, example
from cli.errors import CliError, WrongUsage, limit_too_low
from cli.exit_codes import ExitCode


class _Commands(TyperGroup):
    """All commands. `up` has its options once it is asked for: settings take longer to import than most commands."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name == "up" and command is not None:
            from cli.arguments.up import app as with_options

            listed, command = command, typer.main.get_command(with_options)
            command.help, command.epilog = listed.help, listed.epilog
        return name, command, rest


app = typer.Typer(
    name="meshctl",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_NAMES},
)


def _show_version(asked: bool) -> None:
    if asked:
        from cli.commands.version import version

        raise typer.Exit(version("table"))


@app.callback(epilog=example("meshctl up -d, then meshctl chat"))
def meshctl(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models with a mesh of small actors."""


@app.command(epilog=example("meshctl up -d"))
def up() -> None:
    """Start a mesh, by default one prefill and one decode group with the bundled model."""


for group in (look, control, bench, config, kv, keys):
    app.add_typer(group.app)


@app.command("run", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def run_role(arguments: Annotated[list[str], typer.Argument(metavar="ROLE [OPTIONS]")]) -> None:
    """Run one actor alone; `meshctl run --help` has its options."""
    from cli.commands.run import run

    raise typer.Exit(run(arguments))


def main() -> None:
    sys.excepthook = _unexpected
    try:
        if sys.argv[1:2] == ["run"]:
            # One actor has no use for the option parser of the other commands, which takes 60 ms to import.
            from cli.commands.run import run

            sys.exit(run(sys.argv[2:]))
        if sys.argv[1:] == ["engine"]:
            # Nor does a program have to wait for it.
            from cli.commands.engine import engine

            sys.exit(engine())
        # Calling `app` itself would replace our excepthook; standalone mode would word and print wrong usage itself.
        sys.exit(typer.main.get_command(app)(prog_name="meshctl", standalone_mode=False))
    except TyperException as error:
        if str(error):
            sys.stderr.write(f"{_wrong_usage(error)}\n")
        # Without a message it was `meshctl` alone, and its help was printed.
        sys.exit(ExitCode.USAGE)
    except CliError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader has enough; Python would complain once more when it closes stdout.
        sys.stderr.close()
        sys.exit(ExitCode.FAILED)
    except Exception as error:
        # Whatever takes a descriptor, a thread or memory may meet a limit, and raises what it likes then.
        if (told := limit_too_low("meshctl cannot do this", error)) is None:
            raise
        sys.stderr.write(f"{told}\n")
        sys.exit(told.exit_code)


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    told = CliError(
        "meshctl ended because of an unexpected error",
        why=f"{kind.__name__}: {error}",
        do="report it with the lines above; `meshctl ps` shows what is running",
    )
    sys.stderr.write(f"{told}\n")


def _wrong_usage(error: TyperException) -> WrongUsage:
    context: typer.Context | None = getattr(error, "ctx", None)
    # Errors found while the command line is split up have no context.
    command = context.command_path if context is not None else _command_typed(sys.argv[1:])
    usage = context.get_usage().removeprefix("Usage: ") if context is not None else f"{command} ..."
    return WrongUsage(
        error.format_message().rstrip("."),
        why=f"usage: {usage}",
        do=f"`{command} --help` shows the details, with an example",
    )


def _command_typed(words: list[str]) -> str:
    """The commands that a command line names, up to the first word that is not one: `meshctl config show`."""
    command: Any = typer.main.get_command(app)
    names = ["meshctl"]
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        names.append(word)
    return " ".join(names)


if __name__ == "__main__":
    main()
