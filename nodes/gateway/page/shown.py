"""What the page at `/` is told, as JSON: the mesh as it is, and what is new of its history. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from mesh.membership.view import Member
from mesh.wire.frames import History
from nodes.actor_figures import KV_USAGE, RUNNING, WAITING, ActorFigures, actor_figures
from nodes.call_spans import sample_spans
from nodes.gateway.config import GatewayConfig
from nodes.numerics import kernels_note, numerics_note, quantization_note, weights_note
from nodes.protocol.records import CallRecord, DeathRecord, HeardDeath, SampleRecord
from nodes.stats import ActorStats, hosts_of, silent_hosts

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "running": (*RUNNING, "mesh_gateway_requests_running"),
    "waiting": (*WAITING, "mesh_gateway_requests_waiting"),
    "kv_usage": (KV_USAGE,),
    "tokens_per_s": ("mesh_scheduler_computed_tokens_per_second",),
    "output_tokens_per_s": ("mesh_scheduler_output_tokens_per_second",),
    "first_token_s": ("mesh_time_to_first_token_seconds",),
    "between_tokens_s": ("mesh_inter_token_latency_seconds",),
}
"""Figures of a sample, each the sum of these series."""


class ActorShown(Struct, frozen=True, kw_only=True):
    """A member and its figures. `answers`: it answered the last ask."""

    id: str
    role: str
    host: str
    state: str
    epoch: int
    pid: int
    answers: bool
    figures: ActorFigures


class SampleShown(Struct, frozen=True, kw_only=True):
    """Figures of one actor at a time, Unix seconds by the gateway's clock; absent ones were not there."""

    actor: str
    epoch: int
    number: int
    at: float
    figures: dict[str, float]


class SpansShown(Struct, frozen=True, kw_only=True):
    """One sample of a call, and where its time went: name, begin and end in seconds from its arrival, note."""

    id: str
    tokens: int
    end: str
    spans: list[tuple[str, float, float, str]]


class CallShown(Struct, frozen=True, kw_only=True):
    """A call that ended, without the names of its key and client: whoever has any key may read this."""

    id: str
    gateway: str
    at: float
    route: str
    status: int
    code: str
    finish: str
    total_s: float
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_samples: int
    attempts: int
    samples: list[SpansShown]
    deaths: list[DeathRecord]


class DeathShown(Struct, frozen=True, kw_only=True):
    """An actor of which a supervisor said that it is dead; `at` is Unix time by the gateway's clock."""

    actor: str
    epoch: int
    at: float
    reason: str


class MeshShown(Struct, frozen=True, kw_only=True):
    """One event of `/events/mesh`. `samples`, `calls` and `deaths` are those that this page has not been told yet."""

    now: float
    gateway: str
    model: str
    context: str
    missing: list[str]
    notes: list[str]
    silent: list[str]
    actors: list[ActorShown]
    samples: list[SampleShown] = []
    calls: list[CallShown] = []
    deaths: list[DeathShown] = []


def mesh_shown(
    config: GatewayConfig,
    gateway: str,
    now: float,
    members: Sequence[Member],
    answers: Sequence[ActorStats],
    missing: Sequence[str],
) -> MeshShown:
    """The mesh as it is; `now` is Unix time."""
    figures = actor_figures(members, answers)
    answered = {answer.actor_id for answer in answers if answer.stats is not None}
    hosts = hosts_of(members)
    return MeshShown(
        now=now,
        gateway=gateway,
        model=config.model_name,
        context=f"context {config.context_length} tokens" if config.context is None else str(config.context),
        missing=list(missing),
        notes=[
            note(members) for note in (quantization_note, weights_note, numerics_note, kernels_note) if note(members)
        ],
        silent=silent_hosts(answers),
        actors=[
            ActorShown(
                id=one.actor_id,
                role=one.role,
                host=hosts.get(one.actor_id, ""),
                state=one.state,
                epoch=one.epoch,
                pid=one.pid,
                answers=one.actor_id in answered,
                figures=figures[one.actor_id],
            )
            for one in members
        ],
    )


def samples_shown(actor: str, epoch: int, history: History, now: float) -> list[SampleShown]:
    """The samples of an answer that came at `now`, Unix time. A peer may send columns of any length."""
    first = history.number - len(history.ages_s) + 1
    return [
        SampleShown(
            actor=actor, epoch=epoch, number=first + at, at=round(now - age, 2), figures=_figures(history.columns, at)
        )
        for at, age in enumerate(history.ages_s)
    ]


def _figures(columns: Mapping[str, Sequence[float]], at: int) -> dict[str, float]:
    found: dict[str, Any] = {}
    for name, sources in COLUMNS.items():
        values = [columns[one][at] for one in sources if one in columns and at < len(columns[one])]
        if known := [value for value in values if value >= 0]:
            found[name] = round(sum(known), 5)
    return found


def call_shown(call: CallRecord) -> CallShown:
    samples: list[SampleRecord | None] = [*call.samples] or [None]
    return CallShown(
        id=call.request_id,
        gateway=call.gateway,
        at=call.at,
        route=call.route,
        status=call.status,
        code=call.code,
        finish=call.finish,
        total_s=call.total_s,
        first_token_s=call.first_token_s,
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        output_tokens=call.output_tokens,
        num_samples=call.num_samples,
        attempts=call.attempts,
        samples=[_spans_shown(call, sample) for sample in samples],
        deaths=call.deaths,
    )


def death_shown(death: HeardDeath, now: float) -> DeathShown:
    """A death that a gateway told at `now`, Unix time."""
    return DeathShown(actor=death.actor, epoch=death.epoch, at=round(now - death.ago_s, 2), reason=death.reason)


def _spans_shown(call: CallRecord, sample: SampleRecord | None) -> SpansShown:
    spans = [(one.name, round(one.begin_s, 4), round(one.end_s, 4), one.note) for one in sample_spans(call, sample)]
    if sample is None:
        return SpansShown(id=call.request_id, tokens=0, end=call.code, spans=spans)
    return SpansShown(
        id=sample.request_id, tokens=sample.output_tokens, end=sample.finish or sample.failure, spans=spans
    )
