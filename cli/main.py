"""The command line: options of every command, nothing else. What commands do is in `cli/commands/`, imported when run.

Data goes to stdout, progress and errors to stderr, exit codes are those of `cli/exit_codes.py`.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cli.errors import CliError
from cli.exit_codes import ExitCode

app = typer.Typer(
    name="meshctl",
    help="Serve large language models with a mesh of small actors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, describe or check the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Output = Literal["table", "json"]
NameOption = Annotated[str, typer.Option("--name", metavar="MESH", help="Which mesh; several can live on a host.")]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table or json")]
GroupsArgument = Annotated[list[str] | None, typer.Argument(metavar="GROUP...", help="Like decode-0; all if left out.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", envvar="KVMESH_TOPOLOGY", help="Topology file (TOML).")
]


@app.command()
def up(
    file: FileOption = None,
    model: Annotated[str | None, typer.Option(help="tiny, echo, random:ARCH, or a Hugging Face directory.")] = None,
    name: Annotated[str | None, typer.Option(metavar="MESH", help="Name of this mesh.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill groups.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode groups.")] = None,
    mixed: Annotated[int | None, typer.Option(help="Number of groups that do both.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of each group.")] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="The same, of prefill groups.")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="The same, of decode groups.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP server.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP server.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda (all of them), or cuda:N,cuda:M,...: where models compute.")
    ] = None,
    mem_fraction: Annotated[
        float | None, typer.Option(help="Share of a device's memory for weights, activations and KV.")
    ] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="On a device: fixed tiles, no split sequences; slower.")
    ] = None,
    memory_saver: Annotated[
        bool | None, typer.Option("--memory-saver", help="On a device: `release` backs weights up in host memory.")
    ] = None,
    pool_in_worker: Annotated[
        bool | None,
        typer.Option("--pool-in-worker", help="On a device: workers make their KV pools, which die with them."),
    ] = None,
    gateways: Annotated[int | None, typer.Option(help="Number of gateways, all on the one port.")] = None,
    tokenizers: Annotated[int | None, typer.Option(help="Number of tokenizers.")] = None,
    detokenizers: Annotated[int | None, typer.Option(help="Number of detokenizers.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Longest prompt and output together, in tokens.")] = None,
    kv_pages: Annotated[int | None, typer.Option(help="Pages of each KV pool.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory of each KV pool, like 512MiB.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests in one batch.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens of one prefill chunk.")] = None,
    local_prefill_max: Annotated[
        int | None, typer.Option(help="Uncached prompt tokens that a decode group prefills itself.")
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands instead of running them.")] = False,
) -> None:
    """Start a mesh, by default one prefill and one decode group with the bundled model."""
    from cli.commands.up import up as run

    options: dict[str, Any] = {
        "model": model, "name": name, "prefill": prefill, "decode": decode, "mixed": mixed,
        "tp": tp, "prefill_tp": prefill_tp, "decode_tp": decode_tp, "host": host, "port": port,
        "dtype": dtype, "device": device, "mem_fraction": mem_fraction, "deterministic": deterministic,
        "memory_saver": memory_saver,
        "pool_in_worker": pool_in_worker,
        "gateways": gateways, "tokenizers": tokenizers, "detokenizers": detokenizers,
        "context_length": context_length, "kv__pages": kv_pages, "kv__memory": kv_memory,
        "max_running": max_running, "chunk": chunk, "local_prefill_max": local_prefill_max, "served_name": served_name,
    }  # fmt: skip
    raise typer.Exit(run(file, options, detach=detach, dry_run=dry_run))


@app.command()
def down(
    name: NameOption = "default",
    force: Annotated[bool, typer.Option("--force", help="Kill instead of draining.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the end.")] = 120.0,
) -> None:
    """Stop a mesh: gateways finish what they have, then everything ends."""
    from cli.commands.down import down as run

    raise typer.Exit(run(name, force=force, timeout_s=timeout))


@app.command()
def drain(
    names: Annotated[list[str], typer.Argument(metavar="ACTOR...", help="Actor ids as in ps, or roles.")],
    name: NameOption = "default",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the end.")] = 120.0,
) -> None:
    """Have actors finish what they have and end; they stay away until `restart`."""
    from cli.commands.renew import renew as run

    raise typer.Exit(run(name, names, stay_away=True, timeout_s=timeout))


@app.command()
def restart(
    names: Annotated[list[str], typer.Argument(metavar="ACTOR...", help="Actor ids as in ps, or roles.")],
    name: NameOption = "default",
    timeout: Annotated[float, typer.Option(help="Seconds to wait until all are ready again.")] = 300.0,
) -> None:
    """Renew actors one after the other while the mesh serves: each finishes what it has, ends and starts again."""
    from cli.commands.renew import renew as run

    raise typer.Exit(run(name, names, stay_away=False, timeout_s=timeout))


@app.command()
def ps(name: NameOption = "default", output: OutputOption = "table") -> None:
    """List the actors of a mesh."""
    from cli.commands.ps import ps as run

    raise typer.Exit(run(name, output))


@app.command()
def release(
    groups: GroupsArgument = None,
    name: NameOption = "default",
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Release the KV pools only.")] = False,
    keep_kv: Annotated[bool, typer.Option("--keep-kv", help="Release weights only; caches are kept.")] = False,
    reload_weights: Annotated[
        bool, typer.Option("--reload-weights", help="On a device: drop weights, and read them from disk on resume.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it is released.")] = 120.0,
    output: OutputOption = "table",
) -> None:
    """Have worker groups give their memory back; what they serve goes elsewhere, or waits for `resume`."""
    from cli.commands.memory import release as run
    from nodes.protocol.memory import ReleaseMemory

    wish = ReleaseMemory(groups=groups or [], keep_weights=keep_weights, keep_kv=keep_kv, reload_weights=reload_weights)
    raise typer.Exit(run(name, wish, timeout_s=timeout, output=output))


@app.command()
def resume(
    groups: GroupsArgument = None,
    name: NameOption = "default",
    timeout: Annotated[float, typer.Option(help="Seconds to wait until they serve again.")] = 300.0,
    output: OutputOption = "table",
) -> None:
    """Have worker groups take their memory again, and serve."""
    from cli.commands.memory import resume as run
    from nodes.protocol.memory import ResumeMemory

    raise typer.Exit(run(name, ResumeMemory(groups=groups or []), timeout_s=timeout, output=output))


@app.command()
def memory(name: NameOption = "default", output: OutputOption = "table") -> None:
    """Show which worker groups have their memory."""
    from cli.commands.memory import memory as run

    raise typer.Exit(run(name, output))


@app.command()
def logs(
    actor: Annotated[str | None, typer.Argument(help="Actor id as in ps; all if left out.")] = None,
    name: NameOption = "default",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as more is written.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log to begin with.")] = 50,
) -> None:
    """Show what actors wrote."""
    from cli.commands.logs import logs as run

    raise typer.Exit(run(name, actor, follow=follow, num_lines=lines))


@app.command()
def chat(
    prompt: Annotated[str | None, typer.Argument(help="One message; without it a conversation begins.")] = None,
    name: NameOption = "default",
    url: Annotated[str | None, typer.Option(help="Another server than the mesh's own gateway.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model than the mesh's own.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
) -> None:
    """Talk to a mesh."""
    from cli.commands.chat import ChatOptions
    from cli.commands.chat import chat as run

    options = ChatOptions(system=system, max_tokens=max_tokens, temperature=temperature)
    raise typer.Exit(run(name, prompt, url, model, options))


@app.command()
def models(output: OutputOption = "table") -> None:
    """List the models that need no files; `--model` takes any Hugging Face directory besides."""
    from cli.commands.models import models as run

    raise typer.Exit(run(output))


@config_app.command("show")
def config_show(file: FileOption = None) -> None:
    """The settings in force: defaults, topology file, environment."""
    from cli.commands.config import show

    raise typer.Exit(show(file))


@config_app.command("schema")
def config_schema() -> None:
    """JSON Schema of the topology file."""
    from cli.commands.config import schema

    raise typer.Exit(schema())


@config_app.command("validate")
def config_validate(file: Annotated[Path, typer.Argument(help="Topology file (TOML).")]) -> None:
    """Check a topology file, its model included, without starting anything."""
    from cli.commands.config import validate

    raise typer.Exit(validate(file))


@app.command("run", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def run_role(arguments: Annotated[list[str], typer.Argument(metavar="ROLE [OPTIONS]")]) -> None:
    """Run one actor alone; `meshctl run --help` has its options."""
    from cli.commands.run import run

    raise typer.Exit(run(arguments))


def main() -> None:
    """Entry point of `meshctl`."""
    try:
        if sys.argv[1:2] == ["run"]:
            # Every actor starts here; the option parser of the other commands would cost each 60 ms.
            from cli.commands.run import run

            sys.exit(run(sys.argv[2:]))
        app()
    except CliError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read has enough; Python would complain once more when it closes stdout.
        sys.stderr.close()
        sys.exit(ExitCode.FAILED)
