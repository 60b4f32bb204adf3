"""`meshctl bench`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cli.arguments.options import NameOption, OutputOption, commands, example

app = commands()

KeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The API key to send, and nothing else; default: KVMESH_API_KEY.")
]
EndpointOption = Annotated[
    Literal["completions", "chat"], typer.Option(help="Token ids to /v1/completions, or words to a chat.")
]
ConcurrencyOption = Annotated[int | None, typer.Option(min=1, max=4096, help="Requests at a time; default: 16.")]
RateOption = Annotated[
    float | None, typer.Option(min=0.001, max=10_000.0, help="Requests per second instead, answered or not.")
]
SpacingOption = Annotated[
    Literal["poisson", "constant"], typer.Option(help="With --rate: gaps as of independent users, or all alike.")
]
RequestsOption = Annotated[
    int | None, typer.Option(min=1, max=1_000_000, help="In all; default: 64, or as many as a file has lines.")
]
PromptOption = Annotated[int | None, typer.Option(min=1, max=10_000_000, help="Tokens; default: 128.")]
PrefixOption = Annotated[int, typer.Option(min=0, help="Tokens of it that all prompts begin with.")]
AnswerOption = Annotated[
    int | None, typer.Option("--output-tokens", min=1, max=1_000_000, help="Of each answer; default: 64.")
]
VocabularyOption = Annotated[int, typer.Option(min=11, help="Prompts have token ids below this.")]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Requests of a trace: times, lengths, shared blocks.")
]
SpeedOption = Annotated[float, typer.Option(min=0.001, help="With --trace: how much faster they come.")]
ScaleOption = Annotated[float, typer.Option(min=0.0001, help="With --trace: what lengths are multiplied by.")]
PromptsOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, one a line, as text or JSON.")]
EosOption = Annotated[bool, typer.Option(help="Ask for answers of full length, as not all servers can.")]
WarmUpOption = Annotated[int, typer.Option(min=0, max=10_000, help="Requests before, which are not counted.")]
TimeoutOption = Annotated[float, typer.Option(min=0.1, help="Seconds of silence after which a request has failed.")]
BesideOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Another server, asked the same in turns; ratios are printed.")
]
TurnsOption = Annotated[int, typer.Option(min=1, max=1000, help="With --beside: runs at each server.")]
SvgOption = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also draw the latencies.")]


@app.command(epilog=example("meshctl bench --requests 8 --concurrency 2 --prompt 32 --output-tokens 8"))
def bench(
    name: NameOption = "default",
    url: Annotated[str | None, typer.Option(help="Server to ask instead of the mesh's own gateway.")] = None,
    api_key_file: KeyOption = None,
    model: Annotated[str, typer.Option(help="Model to ask for; default: the first that the server lists.")] = "",
    endpoint: EndpointOption = "completions",
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    spacing: SpacingOption = "poisson",
    requests: RequestsOption = None,
    prompt: PromptOption = None,
    shared_prefix: PrefixOption = 0,
    answer_tokens: AnswerOption = None,
    vocabulary: VocabularyOption = 250,
    trace: TraceOption = None,
    speed: SpeedOption = 1.0,
    scale: ScaleOption = 1.0,
    prompts: PromptsOption = None,
    ignore_eos: EosOption = True,
    warm_up: WarmUpOption = 4,
    timeout: TimeoutOption = 120.0,
    beside: BesideOption = None,
    beside_model: Annotated[str, typer.Option(help="Model to ask that server for.")] = "",
    beside_api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Key for that server.")] = None,
    turns: TurnsOption = 3,
    seed: Annotated[int | None, typer.Option(help="Of prompts and arrival times; default: another each time.")] = None,
    svg: SvgOption = None,
    output: OutputOption = "table",
) -> None:
    """Measure what requests wait for, at a mesh or at any OpenAI-compatible server."""
    given: dict[str, Any] = dict(locals())
    from cli.commands.bench import Asked, Target
    from cli.commands.bench import bench as run

    asked = Asked(**{field.name: given[field.name] for field in fields(Asked)})
    other = Target(beside, beside_api_key_file, beside_model) if beside is not None else None
    raise typer.Exit(run(name, Target(url or "", api_key_file, model), other, asked, svg, output))
