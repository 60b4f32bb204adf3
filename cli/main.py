"""The command line: `meshctl` and its `up`.

The options of `run` are in `cli/commands/run.py`, those of the other commands in `cli/arguments/`. The commands
themselves are in `cli/commands/`, each imported when run. Data goes to stdout, progress and errors to stderr; exit
codes are those of `cli/exit_codes.py`.
"""

import sys
from types import TracebackType
from typing import Annotated, Any, Final

import typer
from typer.exceptions import TyperException

from cli.arguments import bench, config, control, keys, kv, look
from cli.arguments.options import HELP_NAMES, ChatTemplateOption, FileOption, PoolingOption, example
from cli.errors import CliError, WrongUsage, limit_too_low
from cli.exit_codes import ExitCode

_NO_SETTINGS: Final = ("file", "join", "detach", "dry_run")

app = typer.Typer(
    name="meshctl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_NAMES},
)

OriginsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin", metavar="ORIGIN", help="Web origin that browsers may call from, or `*`; may be repeated."
    ),
]
ProxiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-proxies",
        metavar="ADDRESS",
        help="Proxy (address or network) whose X-Forwarded-For says who a client is; may be repeated.",
    ),
]
ApiKeyFileOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Hashes of the API keys that clients must send (`meshctl keys api`)."),
]
ModelOption = Annotated[str | None, typer.Option(help="tiny, echo, random:ARCH, a directory, or ORG/NAME[@REVISION].")]
ServedNameOption = Annotated[
    list[str] | None, typer.Option(help="Name that clients use for the model; may be repeated.")
]
StepOption = Annotated[
    float | None,
    typer.Option(help="Longest step that prompts may cause while streams run, in milliseconds; 0: no limit."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Where models run: cpu, cuda (all devices), or cuda:N,cuda:M,...")
]
MemFractionOption = Annotated[
    float | None, typer.Option(help="Share of a device's memory for weights, activations and KV.")
]
DeterministicOption = Annotated[
    bool | None, typer.Option("--deterministic", help="On a device: fixed tiles, no split sequences; slower.")
]
OtelOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Send traces of calls to this OTLP/HTTP collector (extra otel).")
]
PageOption = Annotated[bool | None, typer.Option("--page/--no-page", help="Serve a page at / that shows the mesh.")]
MemorySaverOption = Annotated[
    bool | None, typer.Option("--memory-saver", help="On a device: `release` backs weights up in host memory.")
]
HostOption = Annotated[
    str | None, typer.Option(help="Address of the HTTP server; if the file has hosts, which of them this is.")
]
JoinOption = Annotated[
    str | None, typer.Option(metavar="TOKEN", help="Join the mesh that issued this token (`meshctl keys token`).")
]
AddressOption = Annotated[
    str | None, typer.Option(help="With --join: address that other hosts dial; default: taken from the route.")
]
PortsOption = Annotated[
    str | None, typer.Option(help="With --join: ports this host listens on, like 7500-7599; default: any free ones.")
]
InsecureOption = Annotated[
    bool | None, typer.Option("--insecure", help="Allow links between hosts without keys, unencrypted.")
]
ControlOption = Annotated[
    bool | None,
    typer.Option("--control", help="Admin keys may flush caches, release memory and abort requests over HTTP."),
]
LogprobsOption = Annotated[
    str | None, typer.Option(help="Logprobs of the model's own distribution, raw, or of the processed one drawn from.")
]
ResponsesOption = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Keep responses of /v1/responses, so much on each host, like 1GiB."),
]
ToolCallParserOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What reads calls of tools: hermes, ...; default: by template."),
]
ReasoningParserOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What reads reasoning: qwen3, ...; default: by template."),
]
DiskOption = Annotated[
    str | None, typer.Option("--kv-disk", metavar="DIR", help="Keep KV pages on disk, in this directory of a host.")
]
DiskSizeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-disk-size", metavar="BYTES", help="How much they take there, like 20GiB; reserved at the start."
    ),
]
DiskWriteOption = Annotated[
    str | None,
    typer.Option("--kv-disk-write", metavar="BYTES", help="Most that is written there in a second, like 200MiB."),
]
StoreOption = Annotated[
    str | None, typer.Option("--kv-store", metavar="NAME", help="Keep KV pages in the installed store of this name.")
]
LocalPrefillOption = Annotated[
    int | None, typer.Option(help="Most uncached prompt tokens that a decode group prefills itself.")
]


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
def up(
    file: FileOption = None,
    model: ModelOption = None,
    name: Annotated[str | None, typer.Option(metavar="MESH", help="Name of this mesh.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill groups.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode groups.")] = None,
    mixed: Annotated[int | None, typer.Option(help="Number of groups that do both.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of each group.")] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="The same for prefill groups.")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="The same for decode groups.")] = None,
    host: HostOption = None,
    join: JoinOption = None,
    address: AddressOption = None,
    ports: PortsOption = None,
    keys: keys.KeysOption = None,
    insecure: InsecureOption = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP server.")] = None,
    cors_origins: OriginsOption = None,
    trusted_proxies: ProxiesOption = None,
    api_key_file: ApiKeyFileOption = None,
    control: ControlOption = None,
    logprobs_of: LogprobsOption = None,
    responses_store: ResponsesOption = None,
    page: PageOption = None,
    otel_endpoint: OtelOption = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    quantize: Annotated[str | None, typer.Option(help="Round weights when they are loaded: none or int8.")] = None,
    pooling: PoolingOption = None,
    device: DeviceOption = None,
    mem_fraction: MemFractionOption = None,
    deterministic: DeterministicOption = None,
    memory_saver: MemorySaverOption = None,
    gateways: Annotated[int | None, typer.Option(help="Number of gateways; all share one port.")] = None,
    tokenizers: Annotated[int | None, typer.Option(help="Number of tokenizers.")] = None,
    detokenizers: Annotated[int | None, typer.Option(help="Number of detokenizers.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Most tokens of a prompt and its output together.")] = None,
    kv__pages: Annotated[int | None, typer.Option("--kv-pages", help="Pages of each KV pool.")] = None,
    kv__memory: Annotated[str | None, typer.Option("--kv-memory", help="Memory of each KV pool, like 512MiB.")] = None,
    kv__disk__directory: DiskOption = None,
    kv__disk__size: DiskSizeOption = None,
    kv__disk__write: DiskWriteOption = None,
    kv__store__name: StoreOption = None,
    max_running: Annotated[int | None, typer.Option(help="Most requests in one batch.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Most tokens in one prefill chunk.")] = None,
    max_step_ms: StepOption = None,
    local_prefill_max: LocalPrefillOption = None,
    served_name: ServedNameOption = None,
    chat_template: ChatTemplateOption = None,
    tool_call_parser: ToolCallParserOption = None,
    reasoning_parser: ReasoningParserOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the mesh is ready.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands instead of running them.")] = False,
) -> None:
    """Start a mesh, by default one prefill and one decode group with the bundled model."""
    # All other options are settings, under the names of the settings (`kv__pages`: `pages` in the table `kv`).
    options = {name: value for name, value in dict(locals()).items() if name not in _NO_SETTINGS and value != []}
    from cli.commands.up import up as run

    raise typer.Exit(run(file, options, join=join, detach=detach, dry_run=dry_run))


app.add_typer(look.app)
app.add_typer(control.app)
app.add_typer(bench.app)
app.add_typer(
    config.app,
    name="config",
    help="Show, describe or check the configuration.",
    epilog=example("meshctl config validate mesh.toml"),
    no_args_is_help=True,
)
app.add_typer(
    kv.app,
    name="kv",
    help="Look at KV pages on disk, and forget them.",
    epilog=example("meshctl kv ls"),
    no_args_is_help=True,
)
app.add_typer(
    keys.app,
    name="keys",
    help="Make this host's key pair, manage which hosts may join, make API keys for clients.",
    epilog=example("meshctl keys ls"),
    no_args_is_help=True,
)


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
