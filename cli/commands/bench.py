"""`meshctl bench`: requests to a mesh, or to any OpenAI-compatible server, and what they had to wait for.

With `--beside` two servers get the same requests in turns, and the ratios of these pairs are what to trust: whatever
else the machine does meets both.
"""

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

from cli.api_key import key_in, own_key
from cli.bench.asked import Asked
from cli.bench.chart import chart
from cli.bench.client import MakeBody, Server
from cli.bench.first_model import first_model
from cli.bench.form import Form, refusal_in, without
from cli.bench.loops import Run, closed_loop, open_loop
from cli.bench.report import HEADER, TURN_HEADER, foot_lines, head_lines, ratio_lines, rows, turn_line
from cli.bench.summary import Summary, ratios, summarize, times_ms
from cli.bench.workload import (
    PATHS,
    BadWorkload,
    Given,
    Made,
    Traced,
    Workload,
    due_times,
    read_prompts,
    read_trace,
)
from cli.client import find_mesh
from cli.errors import CliError, WrongUsage
from cli.exit_codes import ExitCode
from cli.output import print_json, print_table
from mesh.runtime.process_limits import raise_limits

_DEFAULT_REQUESTS: Final = 64
_DEFAULT_CLIENTS: Final = 16

_Lines = TypeVar("_Lines")


@dataclass(frozen=True)
class Target:
    """A server that is asked; `url` empty: the mesh's own; `model` empty: the first one that it lists."""

    url: str = ""
    key_file: Path | None = None
    model: str = ""


@dataclass
class _Side:
    """One of the servers, and its run of each turn."""

    server: Server
    model: str
    runs: list[Run] = field(default_factory=list[Run])

    def body(self, workload: Workload, form: Form, turn: int) -> MakeBody:
        common: dict[str, Any] = {"model": self.model, "temperature": 0}
        return lambda number: common | form.body(workload.body(number, turn))


class _Bench:
    """All turns of one server, or of two."""

    def __init__(self, sides: list[_Side], workload: Workload, asked: Asked, say: Callable[[str], object]) -> None:
        self.sides = sides
        self.num_turns = asked.turns if len(sides) > 1 else 1
        self.num_done = 0
        self.form = Form(ignore_eos=asked.ignore_eos)
        self._workload = workload
        self._asked = asked
        self._say = say

    async def run(self) -> None:
        """Raises CliError if a server does not say which models it has, and none is given."""
        for side in self.sides:
            if not side.model:
                side.server, side.model = await first_model(side.server)
        for side in self.sides:
            while (changed := self._otherwise(side, await self._warm_up(side))) is not None:
                # For all of them, so that they do the same work.
                self.form = changed
        for turn in range(self.num_turns):
            # Each is first as often as second, so that other work on the machine affects both alike.
            for side in self.sides[:: -1 if turn % 2 else 1]:
                run = Run()
                side.runs.append(run)
                await self._send(side, run, turn)
                self._say(turn_line(side.server.url, summarize(run)))
            self.num_done += 1

    async def _send(self, side: _Side, run: Run, turn: int) -> None:
        body = side.body(self._workload, self.form, turn)
        if self._workload.due_s:
            path, silence_s = PATHS[self._asked.endpoint], self._asked.timeout
            await open_loop(side.server, self._workload.due_s, body, run=run, path=path, silence_s=silence_s)
        else:
            await self._send_at_once(side, self._workload.num_requests, body, run)

    def _otherwise(self, side: _Side, warm: Run) -> Form | None:
        """The form that a server which refused the present one may take. Each is another one, so they have an end."""
        for sample in warm.samples:
            refusal = refusal_in(sample.failure, sample.detail)
            if refusal is not None and (changed := without(self.form, refusal)) is not None:
                sys.stderr.write(f"{side.server.url} {refusal.what}: {refusal.instead}\n")
                return changed
        return None

    async def _warm_up(self, side: _Side) -> Run:
        first, body, run = self._workload.num_requests, side.body(self._workload, self.form, 0), Run()

        def later(number: int) -> dict[str, Any]:
            # Other prompts than those that are measured, which would else be in the server's cache.
            return body(first + number)

        await self._send_at_once(side, self._asked.warm_up, later, run)
        return run

    async def _send_at_once(self, side: _Side, num_requests: int, body: MakeBody, run: Run) -> None:
        num_clients = self._asked.concurrency or _DEFAULT_CLIENTS
        path, silence_s = PATHS[self._asked.endpoint], self._asked.timeout
        await closed_loop(side.server, num_clients, num_requests, body, run=run, path=path, silence_s=silence_s)


def bench(name: str, target: Target, beside: Target | None, asked: Asked, svg: Path | None, output: str) -> ExitCode:
    """Send the requests and print what they showed; FAILED if one of them did, INTERRUPTED with what came until then.

    Raises WrongUsage, NotRunning, and CliError if a file cannot be read or written.
    """
    if asked.seed is None:
        # With the seed of the run before, its prompts would be in the server's cache.
        asked = replace(asked, seed=secrets.randbits(32))
    workload = workload_of(asked)
    raise_limits()
    sides = [
        _side(target if target.url else Target(_mesh_url(name), target.key_file, target.model), own_key(os.environ))
    ]
    if beside is not None:
        # Our own key is none of another server's business.
        sides.append(_side(beside, ""))
    shows_turns = beside is not None
    if shows_turns:
        sys.stderr.write(f"{TURN_HEADER}\n")
    whole = _Bench(sides, workload, asked, lambda line: sys.stderr.write(f"{line}\n") if shows_turns else None)
    code = ExitCode.OK
    try:
        uvloop.run(whole.run())
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    told = [summarize(*side.runs) for side in sides]
    if output == "json":
        print_json(_document(whole, told, asked))
    else:
        _print(whole, told)
    if svg is not None:
        _draw(svg, sides)
    is_whole = all(one.num_whole == one.num_requests > 0 for one in told)
    return code if is_whole or code != ExitCode.OK else ExitCode.FAILED


def workload_of(asked: Asked) -> Workload:
    """What the options describe. Raises WrongUsage if they contradict each other, CliError if a file cannot be used."""
    _refuse_contradictions(asked)
    seed = asked.seed or 0
    num_output = 64 if asked.answer_tokens is None else asked.answer_tokens
    if asked.trace is not None:
        lines = _read(asked.trace, read_trace)
        num_requests = min(asked.requests or len(lines), len(lines))
        return Traced(lines, num_requests, asked.speed, asked.scale, asked.vocabulary, seed, asked.endpoint)
    if asked.prompts is not None:
        given = _read(asked.prompts, lambda text: read_prompts(text, asked.endpoint))
        num_requests = asked.requests or len(given)
        return Given(given, num_requests, num_output, _due(asked, num_requests))
    num_requests = asked.requests or _DEFAULT_REQUESTS
    num_prompt = max(128, asked.shared_prefix + 1) if asked.prompt is None else asked.prompt
    if asked.shared_prefix > num_prompt:
        raise WrongUsage(
            f"--shared-prefix {asked.shared_prefix} is longer than --prompt {num_prompt}",
            why="the prefix is the first part of each prompt",
            do="give a shorter prefix or longer prompts",
        )
    return Made(
        num_requests=num_requests,
        num_prompt=num_prompt,
        num_output=num_output,
        num_shared=asked.shared_prefix,
        vocabulary=asked.vocabulary,
        seed=seed,
        endpoint=asked.endpoint,
        due_s=_due(asked, num_requests),
    )


def _due(asked: Asked, num_requests: int) -> list[float]:
    return [] if asked.rate is None else due_times(asked.rate, num_requests, asked.spacing, asked.seed or 0)


def _refuse_contradictions(asked: Asked) -> None:
    given = {
        "--trace": asked.trace, "--prompts": asked.prompts, "--rate": asked.rate, "--concurrency": asked.concurrency,
        "--prompt": asked.prompt, "--output-tokens": asked.answer_tokens,
        "--shared-prefix": asked.shared_prefix or None,
    }  # fmt: skip
    for first, others, why in (
        ("--trace", ("--prompts", "--rate", "--concurrency", "--prompt", "--output-tokens", "--shared-prefix"),
         "a trace says when requests come and how long they are"),
        ("--prompts", ("--prompt", "--shared-prefix"), "the file has the prompts"),
        ("--rate", ("--concurrency",), "requests come either at a rate, or so many at a time"),
    ):  # fmt: skip
        both = [other for other in others if given[first] is not None and given[other] is not None]
        if both:
            raise WrongUsage(f"{first} and {both[0]} exclude each other", why=why, do="leave one of them out")


def _read(file: Path, read: Callable[[str], _Lines]) -> _Lines:
    try:
        return read(file.read_text())
    except (OSError, UnicodeDecodeError, BadWorkload) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CliError(f"{file} cannot be used", why=why, do="see `meshctl bench` in docs/watching.md") from error


def _side(target: Target, own: str) -> _Side:
    key = key_in(target.key_file) if target.key_file is not None else own
    try:
        return _Side(Server.at(target.url, key), target.model)
    except ValueError as error:
        do = "write it like http://127.0.0.1:8000"
        raise WrongUsage(f"{target.url} is not a valid address", why=str(error), do=do) from error


def _mesh_url(name: str) -> str:
    url = find_mesh(name).manifest.url
    if not url:
        why, do = "it is an engine's, and has no HTTP", "give the address of a server with --url"
        raise WrongUsage(f"the mesh {name!r} cannot be asked from here", why=why, do=do)
    return url


def _pairs(whole: _Bench) -> list[tuple[Summary, Summary]]:
    # A turn that was broken off says nothing.
    one, other = (side.runs[: whole.num_done] for side in whole.sides)
    return [(summarize(a), summarize(b)) for a, b in zip(one, other, strict=True)]


def _print(whole: _Bench, told: list[Summary]) -> None:
    for number, (side, summary) in enumerate(zip(whole.sides, told, strict=True)):
        sys.stdout.write("\n" if number else "")
        sys.stdout.write("\n".join([f"{side.server.url}: {side.model}", *head_lines(summary), ""]))
        print_table(HEADER, rows(summary))
        sys.stdout.write("\n".join([*foot_lines(summary), ""]))
    if len(whole.sides) > 1 and whole.num_done:
        first, second = (side.server.url for side in whole.sides)
        heading = f"{first} / {second}, median of {whole.num_done} turns (least to greatest):"
        lines = ratio_lines(ratios(_pairs(whole))) or ["nothing to compare: both have to answer in every turn"]
        sys.stdout.write("\n".join(["", heading, *lines, ""]))


def _document(whole: _Bench, told: list[Summary], asked: Asked) -> dict[str, Any]:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(asked).items()}
    servers = [
        {"url": side.server.url, "model": side.model, "turns": [summarize(run) for run in side.runs], "all": summary}
        for side, summary in zip(whole.sides, told, strict=True)
    ]
    compared = ratios(_pairs(whole)) if len(whole.sides) > 1 and whole.num_done else {}
    named = {name: dict(zip(("least", "median", "greatest"), values, strict=True)) for name, values in compared.items()}
    return {"options": options, "sent": vars(whole.form), "servers": servers, "ratios": named}


def _draw(file: Path, sides: list[_Side]) -> None:
    """Raises CliError."""
    curves: dict[str, dict[str, list[float]]] = {}
    for side in sides:
        whole = [sample for run in side.runs for sample in run.samples if sample.is_whole]
        # Two sides may be one server, to see what differs by itself.
        name = side.server.url if side.server.url not in curves else f"{side.server.url} (beside)"
        curves[name] = times_ms(whole)
    try:
        file.write_text(chart(f"meshctl bench: {sides[0].model}", curves))
    except OSError as error:
        why, do = error.strerror or str(error), "give a file that can be written"
        raise CliError(f"{file} cannot be written", why=why, do=do) from error
