"""Commands that show something, and `chat`."""

from typing import Annotated, Literal

import typer

from cli.arguments.config import HostOption
from cli.arguments.options import (
    HELP_NAMES,
    ChatTemplateOption,
    FileOption,
    NameOption,
    NamesOption,
    OutputOption,
    PoolingOption,
    commands,
    example,
)
from cli.errors import WrongUsage

app = commands()

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LogOutput = Literal["text", "json"]
_MOST = 100
"""As `nodes.protocol.records.MAX_CALLS`, which is not imported: `meshctl --help` would wait for it."""
TraceOutput = Literal["text", "json", "chrome"]
MeshOption = Annotated[
    str | None, typer.Option("--name", metavar="MESH", envvar="KVMESH_NAME", help="Which mesh; by default the file's.")
]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Refresh every two seconds until Ctrl-C.")]


@app.command("status", epilog=example("meshctl status"), help="The same as `ps`.")
@app.command(epilog=example("meshctl ps"))
def ps(name: NamesOption = None, watch: WatchOption = False, output: OutputOption = "table") -> None:
    """Show the actors of a mesh, or of all meshes: what they are, what they use, what they do."""
    from cli.commands.ps import ps as run

    raise typer.Exit(run(name, output, watch=watch))


@app.command(epilog=example("meshctl top"))
def top(
    name: NameOption = "default",
    interval: Annotated[
        float | None, typer.Option(min=0.2, metavar="SECONDS", help="Between looks: 1 on a terminal, else only one.")
    ] = None,
    output: OutputOption = "table",
) -> None:
    """Show who is busy: CPU, memory, batches, queues, KV, tokens/s and restarts of all actors, until Ctrl-C."""
    from cli.commands.top import top as run

    raise typer.Exit(run(name, output, interval))


@app.command(epilog=example("meshctl logs worker --since 10m"))
def logs(
    names: Annotated[list[str] | None, typer.Argument(metavar="ACTOR...", help="Actor ids as in ps, or roles.")] = None,
    name: NameOption = "default",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Last lines to show; 50, or with --since all that match.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only newer lines: 30s, 10m, 2h, 1d, or 2026-01-31T12:00.")
    ] = None,
    level: Annotated[LogLevel, typer.Option(help="Lowest level to show.")] = "debug",
    output: Annotated[
        LogOutput | None, typer.Option("--output", "-o", help="text or json; the default is text.")
    ] = None,
) -> None:
    """Show what actors logged, in order of time (with -f: as hosts send it); also after the mesh has ended."""
    from cli.commands.logs import Wanted
    from cli.commands.logs import logs as run

    wanted = Wanted(names=tuple(names or ()), num_lines=lines, since=since, level=level)
    raise typer.Exit(run(name, wanted, follow=follow, output=output))


@app.command(epilog=example("meshctl trace --slowest 5"))
def trace(
    request: Annotated[
        str, typer.Argument(metavar="[REQUEST]", help="A request's id, its X-Request-Id, traceparent or trace id.")
    ] = "",
    name: NameOption = "default",
    last: Annotated[
        int | None, typer.Option("--last", min=1, max=_MOST, help="The calls that ended last, so many.")
    ] = None,
    slowest: Annotated[
        int | None, typer.Option("--slowest", min=1, max=_MOST, help="The slowest calls, those that run included.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing calls that end, until Ctrl-C.")] = False,
    output: Annotated[
        TraceOutput, typer.Option("--output", "-o", help="text, json, or chrome (for Perfetto).")
    ] = "text",
) -> None:
    """Show what a request waited for, also after its gateway or the mesh has ended; without options, the last one."""
    from cli.commands.trace import Wanted
    from cli.commands.trace import trace as run

    given = [bool(request), last is not None, slowest is not None, follow]
    if sum(given) > 1:
        raise WrongUsage("trace takes one of them", why="REQUEST, --last, --slowest and --follow exclude each other",
                         do="give one")  # fmt: skip
    wanted = Wanted(request, last or (0 if any(given) else 1), slowest or 0)
    raise typer.Exit(run(name, wanted, output, follow=follow))


@app.command(epilog=example("meshctl probe ready"))
def probe(
    question: Annotated[Literal["live", "ready", "generate"], typer.Argument(metavar="live|ready|generate")],
    name: NameOption = "default",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds the check may take.")] = 10.0,
) -> None:
    """Answer a health check (supervisor, this host's roles, or a token) with one line and an exit code."""
    from cli.commands.probe import probe as run

    raise typer.Exit(run(name, question, timeout_s=timeout))


@app.command(epilog=example("meshctl doctor"))
def doctor(
    file: FileOption = None,
    name: MeshOption = None,
    host: HostOption = None,
    output: OutputOption = "table",
) -> None:
    """Check whether this machine is fit for a mesh: memory, limits, kernels, clock, ports, rights, versions."""
    from cli.commands.doctor import doctor as run

    raise typer.Exit(run(file, name, host, output))


@app.command(epilog=example('meshctl chat --temperature 0 "What is 37 + 45?"'))
def chat(
    prompt: Annotated[str | None, typer.Argument(help="One message; without it a conversation starts.")] = None,
    name: NameOption = "default",
    url: Annotated[str | None, typer.Option(help="Server to talk to instead of the mesh's own gateway.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask instead of the mesh's own.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
) -> None:
    """Talk to a mesh; `/help` in a conversation says what can be typed."""
    from cli.commands.chat import ChatOptions
    from cli.commands.chat import chat as run

    options = ChatOptions(system=system, max_tokens=max_tokens, temperature=temperature)
    raise typer.Exit(run(name, prompt, url, model, options))


_models = typer.Typer(add_completion=False, context_settings={"help_option_names": HELP_NAMES})
app.add_typer(_models, name="models")


@_models.callback(invoke_without_command=True, epilog=example("meshctl models"))
def models(context: typer.Context, output: OutputOption = "table") -> None:
    """List the models that need no files; `--model` also takes any Hugging Face directory."""
    if context.invoked_subcommand is None:
        from cli.commands.models import models as run

        raise typer.Exit(run(output))


@_models.command("show", epilog=example("meshctl models show tiny"))
def show_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As with `up --model`: mostly a directory.")],
    chat_template: ChatTemplateOption = None,
    pooling: PoolingOption = None,
    output: OutputOption = "table",
) -> None:
    """Show what a mesh would make of a model's files, and which file says so. Starts and fetches nothing."""
    from cli.commands.models import show as run

    raise typer.Exit(run(model, chat_template or "", pooling or "auto", output))


@app.command(epilog=example("meshctl version"))
def version(output: OutputOption = "table") -> None:
    """Show the versions of kvmesh, of its protocol and of Python."""
    from cli.commands.version import version as run

    raise typer.Exit(run(output))
