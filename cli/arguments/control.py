"""Commands that change a mesh: stop it, restart its actors, release its memory."""

from typing import Annotated

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
