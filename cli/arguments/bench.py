"""`meshctl bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.arguments.options import NameOption, OutputOption, commands, example, options_of, with_options
from cli.bench.asked import Asked

app = commands()


@app.command(epilog=example("meshctl bench --requests 8 --concurrency 2 --prompt 32 --output-tokens 8"))
@with_options(options_of(Asked))
def bench(
    *,
    name: NameOption = "default",
    url: Annotated[str | None, typer.Option(help="Server to ask instead of the mesh's own gateway.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The API key to send, and nothing else; default: KVMESH_API_KEY."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model to ask for; default: the first that the server lists.")] = "",
    beside: Annotated[
        str | None, typer.Option(metavar="URL", help="Another server, asked the same in turns; ratios are printed.")
    ] = None,
    beside_model: Annotated[str, typer.Option(help="Model to ask that server for.")] = "",
    beside_api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Key for that server.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also draw the latencies.")] = None,
    output: OutputOption = "table",
    **asked: Any,
) -> None:
    """Measure what requests wait for, at a mesh or at any OpenAI-compatible server."""
    from cli.commands.bench import Target
    from cli.commands.bench import bench as run

    other = Target(beside, beside_api_key_file, beside_model) if beside is not None else None
    raise typer.Exit(run(name, Target(url or "", api_key_file, model), other, Asked(**asked), svg, output))
