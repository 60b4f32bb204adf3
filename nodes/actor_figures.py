"""Figures of each actor, as `meshctl ps` and the gateway's page show them. Pure.

This file alone defines what each figure means; the metric names that dashboards know from vLLM are made from the same
series (`nodes/gateway/shown/metrics.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mesh.membership.view import Member
from mesh.wire.frames import StatsReply
from mesh.wire.message import Part
from nodes import roles
from nodes.amounts import amount
from nodes.stats import ActorStats

RUNNING: Final = ("mesh_scheduler_num_running",)
"""Requests in running batches."""
WAITING: Final = ("mesh_scheduler_num_waiting", "mesh_scheduler_num_handoffs")
"""Requests that wait for a place in a batch or for their KV pages."""
CALLS_IN_FLIGHT: Final = "mesh_gateway_calls_inflight"
"""Calls of clients that a gateway has not answered to their end, also those that no scheduler has yet."""
KV_USAGE: Final = "mesh_scheduler_kv_usage_ratio"
PULLED_BYTES: Final = "mesh_kv_pulled_bytes_total"
"""Bytes of pages that a kv_agent has pulled from other pools, by transport."""

_UNREACHED: Final = 'mesh_unreached_seconds{peer="'
_PULLED_BY: Final = f'{PULLED_BYTES}{{transport="'
_RUNNING: Final = {roles.SCHEDULER: RUNNING, roles.GATEWAY: ("mesh_gateway_requests_running",)}
_WAITING: Final = {roles.SCHEDULER: WAITING, roles.GATEWAY: ("mesh_gateway_requests_waiting",)}


FIGURE_NAMES: Final = ("GROUP", "PHASE", "CPU", "MEMORY", "RUNNING", "WAITING", "KV", "TOKENS/S")
"""Column headings in tables, in the order of `figure_texts`."""


class ActorFigures(Part, frozen=True):
    """Figures of one actor. None: the actor does not report it, or has no such thing.

    `group` and `phase` are its worker group's. `cpu_cores`, `tokens_per_s` and `output_tokens_per_s` are means of the
    last ten seconds: cores that its process keeps busy, tokens computed (of prompts and output), tokens drawn.
    `memory_bytes` is its process's resident memory, shared pages included. At a gateway, a request runs once a
    scheduler has it. `kv_usage` is the share of the group's pages that are neither free nor only cached.
    `hit_ratio` is the share of the prompts' tokens of the last ten seconds that were in the prefix cache.
    `lacks_pages`: the request that is next to enter a batch waits for KV pages.
    `unreached` are members that gave no answer when it dialed them last, with the seconds since the first such dial.
    `step_s` is how long a step of the last ten seconds took on average, by its worker's account.
    `pulled_bytes` is how much a kv_agent has pulled over each transport; transports that moved nothing are left out.
    """

    group: str = ""
    phase: str = ""
    cpu_cores: float | None = None
    memory_bytes: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_usage: float | None = None
    tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    pulled_bytes: dict[str, int] = {}
    hit_ratio: float | None = None
    step_s: float | None = None
    unreached: dict[str, float] = {}
    lacks_pages: bool = False


def actor_figures(members: Sequence[Member], answers: Sequence[ActorStats]) -> dict[str, ActorFigures]:
    """Figures of every member by actor id, from its attributes and its answer to `StatsRequest`."""
    stats = {answer.actor_id: answer.stats for answer in answers}
    phases = {
        _group(member): _text(member.attributes.get("phase")) for member in members if "phase" in member.attributes
    }
    return {
        member.actor_id: _figures(member, phases.get(_group(member), ""), stats.get(member.actor_id))
        for member in members
    }


def figure_texts(figures: ActorFigures) -> tuple[str, ...]:
    """A text for each of `FIGURE_NAMES`; `-` where the figure is unknown. 100 % of CPU is one core."""
    memory = figures.memory_bytes
    return (
        figures.group or "-",
        figures.phase or "-",
        "-" if figures.cpu_cores is None else f"{figures.cpu_cores:.0%}",
        "-" if memory is None else amount(memory),
        "-" if figures.num_running is None else str(figures.num_running),
        "-" if figures.num_waiting is None else str(figures.num_waiting),
        "-" if figures.kv_usage is None else f"{figures.kv_usage:.0%}",
        "-" if figures.tokens_per_s is None else f"{figures.tokens_per_s:,.1f}",
    )


def _figures(member: Member, phase: str, stats: StatsReply | None) -> ActorFigures:
    group = _group(member)
    if stats is None:
        return ActorFigures(group=group, phase=phase if group else "")
    series: Mapping[str, float] = {**stats.counters, **stats.gauges}
    memory = series.get("mesh_resident_memory_bytes")
    num_looked_up = series.get("mesh_scheduler_prefix_query_tokens_per_second", 0.0)
    num_steps = series.get("mesh_scheduler_steps_per_second", 0.0)
    return ActorFigures(
        group=group,
        phase=phase if group else "",
        cpu_cores=series.get("mesh_cpu_cores"),
        memory_bytes=None if memory is None else int(memory),
        num_running=_sum(series, _RUNNING.get(member.role, ())),
        num_waiting=_sum(series, _WAITING.get(member.role, ())),
        kv_usage=series.get(KV_USAGE),
        tokens_per_s=series.get("mesh_scheduler_computed_tokens_per_second"),
        output_tokens_per_s=series.get("mesh_scheduler_output_tokens_per_second"),
        pulled_bytes={name: int(value) for name, value in _labelled(series, _PULLED_BY).items() if value},
        unreached=_labelled(series, _UNREACHED),
        lacks_pages=bool(series.get("mesh_scheduler_lacks_pages")),
        # Without prompts there is no share of them.
        hit_ratio=series.get("mesh_scheduler_prefix_hit_tokens_per_second", 0.0) / num_looked_up
        if num_looked_up
        else None,
        step_s=series.get("mesh_scheduler_step_seconds_per_second", 0.0) / num_steps if num_steps else None,
    )


def _labelled(series: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The samples of a series with one label, by its value; `prefix` goes up to that."""
    found = {name.removeprefix(prefix): value for name, value in series.items() if name.startswith(prefix)}
    return {name.removesuffix('"}'): value for name, value in found.items()}


def _sum(series: Mapping[str, float], names: Sequence[str]) -> int | None:
    found = [series[name] for name in names if name in series]
    return int(sum(found)) if found else None


def _group(member: Member) -> str:
    return _text(member.attributes.get("group"))


def _text(value: Any) -> str:
    """Each actor defines its own attributes, so a custom actor's may be of any type."""
    return value if isinstance(value, str) else ""
