"""What `meshctl bench` is asked to send: each option once, with its bounds and its line of `--help`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of what is sent, as given; None where it was left out."""

    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="Token ids to /v1/completions, or words to a chat.")
    ] = "completions"
    concurrency: Annotated[int | None, typer.Option(min=1, max=4096, help="Requests at a time; default: 16.")] = None
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=10_000.0, help="Requests per second instead, answered or not.")
    ] = None
    spacing: Annotated[
        Literal["poisson", "constant"], typer.Option(help="With --rate: gaps as of independent users, or all alike.")
    ] = "poisson"
    requests: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="In all; default: 64, or as many as a file has lines.")
    ] = None
    prompt: Annotated[int | None, typer.Option(min=1, max=10_000_000, help="Tokens; default: 128.")] = None
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens of it that all prompts begin with.")] = 0
    answer_tokens: Annotated[
        int | None, typer.Option("--output-tokens", min=1, max=1_000_000, help="Of each answer; default: 64.")
    ] = None
    vocabulary: Annotated[int, typer.Option(min=11, help="Prompts have token ids below this.")] = 250
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests of a trace: times, lengths, shared blocks.")
    ] = None
    speed: Annotated[float, typer.Option(min=0.001, help="With --trace: how much faster they come.")] = 1.0
    scale: Annotated[float, typer.Option(min=0.0001, help="With --trace: what lengths are multiplied by.")] = 1.0
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, one a line, as text or JSON.")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length, as not all servers can.")] = True
    warm_up: Annotated[int, typer.Option(min=0, max=10_000, help="Requests before, which are not counted.")] = 4
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of silence after which a request has failed.")] = (
        120.0
    )
    turns: Annotated[int, typer.Option(min=1, max=1000, help="With --beside: runs at each server.")] = 3
    seed: Annotated[int | None, typer.Option(help="Of prompts and arrival times; default: another each time.")] = None
