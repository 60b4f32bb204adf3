"""Commands that change a mesh: stop it, restart its actors, release its memory, strike it."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.arguments.options import ActorsArgument, GroupsArgument, NameOption, OutputOption, commands, example

app = commands()


@app.command(epilog=example("meshctl down"))
def down(
    name: NameOption = "default",
    host: Annotated[str, typer.Option(help="In a mesh of several hosts, stop this one only.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Kill instead of draining.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until everything has ended.")] = 120.0,
) -> None:
    """Stop a mesh, on all its hosts: gateways finish what they have, then everything ends."""
    from cli.commands.down import down as run

    raise typer.Exit(run(name, host=host, force=force, timeout_s=timeout))


@app.command(epilog=example("meshctl drain scheduler-prefill-0"))
def drain(
    names: ActorsArgument,
    name: NameOption = "default",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until everything has ended.")] = 120.0,
) -> None:
    """Have actors finish their work and end; they stay away until `restart`."""
    from cli.commands.restart import restart as run

    raise typer.Exit(run(name, names, stay_away=True, timeout_s=timeout))


@app.command(epilog=example("meshctl restart tokenizer"))
def restart(
    names: ActorsArgument,
    name: NameOption = "default",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until all are ready again.")] = 300.0,
) -> None:
    """Restart actors one after the other while the mesh serves: each finishes what it has, ends and starts again."""
    from cli.commands.restart import restart as run

    raise typer.Exit(run(name, names, stay_away=False, timeout_s=timeout))


@app.command(epilog=example("meshctl release prefill-0 --keep-weights"))
def release(
    groups: GroupsArgument = None,
    name: NameOption = "default",
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Release the KV pools only.")] = False,
    keep_kv: Annotated[bool, typer.Option("--keep-kv", help="Release weights only and keep the caches.")] = False,
    reload_weights: Annotated[
        bool, typer.Option("--reload-weights", help="On a device: drop weights; resume reads them from disk.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until it is released.")] = 120.0,
    output: OutputOption = "table",
) -> None:
    """Have worker groups give their memory back; their requests go elsewhere, or wait for `resume`."""
    from cli.commands.memory import release as run
    from nodes.protocol.memory import ReleaseMemory

    request = ReleaseMemory(
        groups=groups or [], keep_weights=keep_weights, keep_kv=keep_kv, reload_weights=reload_weights
    )
    raise typer.Exit(run(name, request, timeout_s=timeout, output=output))


@app.command(epilog=example("meshctl resume"))
def resume(
    groups: GroupsArgument = None,
    name: NameOption = "default",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until they serve again.")] = 300.0,
    output: OutputOption = "table",
) -> None:
    """Have worker groups take their memory back, and serve again."""
    from cli.commands.memory import resume as run
    from nodes.protocol.memory import ResumeMemory

    raise typer.Exit(run(name, ResumeMemory(groups=groups or []), timeout_s=timeout, output=output))


@app.command(epilog=example("meshctl memory -o json"))
def memory(name: NameOption = "default", output: OutputOption = "table") -> None:
    """Show which worker groups hold their memory."""
    from cli.commands.memory import memory as run

    raise typer.Exit(run(name, output))


@app.command(epilog=example("meshctl chaos --seconds 5 --every 1 --seed 1 --yes"))
def chaos(
    name: NameOption = "default",
    seconds: Annotated[float, typer.Option(min=1.0, max=86_400.0, help="How long blows fall.")] = 60.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one blow to the next.")] = 3.0,
    seed: Annotated[int | None, typer.Option(help="Of blows and requests; default: another each time.")] = None,
    only: Annotated[
        str, typer.Option(metavar="ROLE,...", help="Roles or actor ids; default: all of this host but gateways.")
    ] = "",
    blows: Annotated[
        str, typer.Option(metavar="KIND,...", help="Of kill, stop, garbage, slow (readers).")
    ] = "kill,stop,garbage,slow",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Clients that ask at a time.")] = 8,
    stall: Annotated[float, typer.Option(min=0.2, help="Seconds without a token that count as a stall.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which an answer is lost.")] = 60.0,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The API key to send; default: KVMESH_API_KEY.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether it is wanted.")] = False,
    output: OutputOption = "table",
) -> None:
    """Kill, stop and disturb actors of one's own mesh while requests run, and show what clients noticed."""
    given: dict[str, Any] = dict(locals())
    from cli.chaos.blows import kinds_in
    from cli.commands.chaos import Options
    from cli.commands.chaos import chaos as run

    given |= {"only": [word for word in only.split(",") if word], "blows": kinds_in(blows)}
    options = Options(**{field.name: given[field.name] for field in fields(Options)})
    raise typer.Exit(run(name, options, output))
