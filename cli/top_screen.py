"""What `meshctl top` shows of a mesh at one moment, from what its supervisors say. Pure.

A screen is a head and sections, each a table with a heading; whoever has more to show adds a section.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from cli.commands.ps import heading, story
from cli.output import duration, printable, table_lines
from cli.protocol import ActorList, ActorStatus
from cli.trace.text import seconds
from mesh.membership.view import READY
from nodes import roles
from nodes.actor_figures import FIGURE_NAMES, ActorFigures, figure_texts
from nodes.amounts import amount
from nodes.call_spans import sample_spans
from nodes.protocol.records import CallRecord, CallsFound

_COLUMNS: Final = (
    "ACTOR", "HOST", "STATE", "UPTIME", "CPU", "PSS", "RSS", "RUNNING", "WAITING", "KV", "HITS", "STEP", "TOKENS/S",
    "DRAWN/S", "STARTS",
)  # fmt: skip
_DISPENSABLE: Final = ("HOST", "RSS", "UPTIME", "STARTS", "STATE")
"""What a narrow terminal goes without, in this order."""
_CALL_COLUMNS: Final = ("REQUEST", "AGE", "PHASE", "AT", "TOKENS", "SAMPLES", "TRIES", "KEY")
_CLIENT_COLUMNS: Final = ("KEY", "CALLS", "WAITING", "LONGEST", "OUTPUT")
_CALL_DISPENSABLE: Final = ("KEY", "SAMPLES", "TRIES", "AT")
_ORDER: Final = (roles.SCHEDULER, roles.WORKER, roles.GATEWAY, roles.TOKENIZER, roles.DETOKENIZER)
"""Who has most to show stands first, where a low terminal does not cut it off."""
_NUM_CALLS: Final = 20
"""As many as are read; the rest are counted."""
_LEAST_LINES: Final = 3
"""So much of a section is shown however low the terminal is: its heading, a line, and how many more there are."""


class Section(NamedTuple):
    """A table. Without a `heading`, its first line has the names of columns."""

    heading: str
    lines: Sequence[str]


class Memory:
    """PSS by incarnation: asked for less often than the rest, since the kernel goes through all pages to tell it."""

    def __init__(self) -> None:
        self._bytes: Mapping[tuple[str, int], int] = {}

    def take(self, actors: Sequence[ActorStatus]) -> None:
        """What a list says that was asked for it."""
        self._bytes = {(a.actor_id, a.epoch): a.pss_bytes for a in actors if a.pss_bytes is not None}

    def filled(self, mesh: ActorList) -> ActorList:
        """A list, with what was last said of those that it does not say it of."""
        known = self._bytes
        actors = [msgspec.structs.replace(a, pss_bytes=known.get((a.actor_id, a.epoch))) for a in mesh.actors]
        return msgspec.structs.replace(mesh, actors=actors)


def head_lines(mesh: ActorList, moment: str) -> list[str]:
    """Which mesh, what it does as a whole, and what people should know about it."""
    of_gateways = [actor.figures for actor in mesh.actors if actor.role == roles.GATEWAY]
    all_figures = [actor.figures for actor in mesh.actors]
    memory = [actor.pss_bytes if actor.pss_bytes is not None else actor.figures.memory_bytes for actor in mesh.actors]
    running = sum(figures.num_running or 0 for figures in of_gateways)
    waiting = sum(figures.num_waiting or 0 for figures in of_gateways)
    return [
        f"{heading(mesh)}  {moment}",
        f"requests {running} running, {waiting} waiting; "
        f"{sum(f.tokens_per_s or 0.0 for f in all_figures):,.1f} tokens/s, "
        f"{sum(f.output_tokens_per_s or 0.0 for f in all_figures):,.1f} drawn; "
        f"CPU {sum(f.cpu_cores or 0.0 for f in all_figures):.2f} cores; memory {amount(sum(filter(None, memory)))}",
        *map(printable, mesh.notes),
    ]


def sections(mesh: ActorList, width: int | None) -> list[Section]:
    """Its actors, and what happened to those to which something did, the latest first."""
    has_hosts = any(actor.host for actor in mesh.actors)
    names = [name for name in _COLUMNS if name != "HOST" or has_hosts]
    ordered = sorted(mesh.actors, key=lambda actor: (*_ORDER, actor.role).index(actor.role))
    rows = [[_cells(actor)[name] for name in names] for actor in ordered]
    actors, _ = table_lines(names, rows, width=width, dispensable=[name for name in _DISPENSABLE if name in names])
    told = sorted((actor for actor in mesh.actors if actor.last_reason), key=lambda actor: actor.last_reason_age_s)
    happened = [
        printable(f"{actor.actor_id}  {_restarts(actor.num_restarts)}{line}") for actor in told for line in story(actor)
    ]
    return [Section("", actors), *([Section("RESTARTS", happened)] if happened else [])]


def calls_section(found: CallsFound, width: int | None) -> list[Section]:
    """The calls that run, the one first that has taken longest, and what each of its first samples waits for."""
    if not found.calls:
        return []
    rows: list[list[str]] = []
    oldest = found.calls[::-1]
    for call in oldest[:_NUM_CALLS]:
        # Of many samples one line: they wait for much the same, and `meshctl trace` shows the others.
        sample = call.samples[0] if call.samples else None
        phase = sample_spans(call, sample)[-1]
        tokens = f"{call.prompt_tokens}+{call.output_tokens}"
        cells = (call.request_id, duration(call.total_s), phase.name, phase.note or "-", tokens, str(call.num_samples))
        rows.append([printable(cell) for cell in (*cells, str(call.attempts), call.key or "-")])
    lines, _ = table_lines(_CALL_COLUMNS, rows, width=width, dispensable=_CALL_DISPENSABLE)
    more = found.num - len(rows)
    requests = Section("REQUESTS", [*lines, *([f"... {more} more"] if more > 0 else [])])
    return [*_clients(oldest, width), requests]


def _clients(calls: Sequence[CallRecord], width: int | None) -> list[Section]:
    """Whose calls these are, who waits longest first: how many, without a token yet, since when, with what output."""
    by_key: dict[str, list[CallRecord]] = {}
    for call in calls:
        by_key.setdefault(call.key, []).append(call)
    if len(by_key) < 2:
        # Alone, a client waits for nobody else; without keys all are one here.
        return []
    told: list[tuple[float, list[str]]] = []
    for key, its in by_key.items():
        waiting = [call.total_s for call in its if call.first_token_s < 0]
        longest_s, output = max(waiting, default=0.0), sum(call.output_tokens for call in its)
        wait = duration(longest_s) if waiting else "-"
        told.append((longest_s, [printable(key) or "-", str(len(its)), str(len(waiting)), wait, f"{output:,}"]))
    told.sort(key=lambda one: -one[0])
    return [Section("CLIENTS", table_lines(_CLIENT_COLUMNS, [row for _, row in told], width=width)[0])]


def screen(
    head: Sequence[str], shown: Sequence[Section], width: int | None = None, height: int | None = None
) -> list[str]:
    """All lines, cut to `width` and `height`. Where there is too little room, the longest section is cut first."""
    if height is not None:
        shown = _cut(shown, height - len(head) - sum(1 + bool(section.heading) for section in shown))
    lines = [*head]
    for section in shown:
        lines += ["", *([section.heading] if section.heading else []), *section.lines]
    return [line[:width] for line in lines[:height]]


def _cut(shown: Sequence[Section], room: int) -> list[Section]:
    kept = [len(section.lines) for section in shown]
    while sum(kept) > room and max(kept) > _LEAST_LINES:
        kept[kept.index(max(kept))] -= 1
    return [
        section
        if len(section.lines) <= num_lines
        else section._replace(
            lines=[
                *section.lines[: num_lines - 1],
                f"... {len(section.lines) - num_lines + 1} more; a higher terminal, a pipe or -o json shows them",
            ]
        )
        for section, num_lines in zip(shown, kept, strict=True)
    ]


def _cells(actor: ActorStatus) -> dict[str, str]:
    figures: ActorFigures = actor.figures
    texts = dict(zip(FIGURE_NAMES, figure_texts(figures), strict=True))
    return texts | {
        "ACTOR": printable(actor.actor_id),
        "HOST": printable(actor.host) or "-",
        # Capitals stand out among many that are ready, without colours too.
        "STATE": actor.state if actor.state == READY else printable(actor.state).upper(),
        "UPTIME": duration(actor.uptime_s) if actor.uptime_s else "-",
        "PSS": "-" if actor.pss_bytes is None else amount(actor.pss_bytes),
        "RSS": texts["MEMORY"],
        "HITS": "-" if figures.hit_ratio is None else f"{figures.hit_ratio:.0%}",
        "STEP": "-" if figures.step_s is None else seconds(figures.step_s),
        "DRAWN/S": "-" if figures.output_tokens_per_s is None else f"{figures.output_tokens_per_s:,.1f}",
        "STARTS": str(actor.num_starts),
    }


def _restarts(number: int) -> str:
    return "" if not number else f"{number} restart{'s' if number > 1 else ''}: "
