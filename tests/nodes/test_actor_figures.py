"""The figures of `meshctl ps` and of the gateway's page, from what members announce and answer."""

from typing import Any
from unittest.mock import Mock

import msgspec

from mesh.address import Endpoint
from mesh.membership.view import Member
from mesh.wire.frames import StatsReply
from nodes.actor_figures import FIGURE_NAMES, PULLED_BYTES, ActorFigures, actor_figures, figure_texts
from nodes.scheduler.actor import SchedulerActor
from nodes.stats import ActorStats


def member(actor_id: str, role: str, **attributes: Any) -> Member:
    return Member(actor_id=actor_id, role=role, epoch=1, endpoint=Endpoint("c", "d"), attributes=attributes)


def answer(actor_id: str, role: str, **gauges: float) -> ActorStats:
    named = {f"mesh_{name}": value for name, value in gauges.items()}
    return ActorStats(actor_id, role, 1, StatsReply(counters={}, gauges=named))


SCHEDULER = answer(
    "s", "scheduler", scheduler_num_running=3, scheduler_num_waiting=2, scheduler_num_handoffs=4,
    scheduler_kv_usage_ratio=0.25, scheduler_computed_tokens_per_second=1234.5,
    scheduler_output_tokens_per_second=34.5, scheduler_prefix_query_tokens_per_second=200.0,
    scheduler_prefix_hit_tokens_per_second=50.0, scheduler_steps_per_second=8.0,
    scheduler_step_seconds_per_second=0.4, cpu_cores=1.5, resident_memory_bytes=3 << 30,
)  # fmt: skip


def test_a_group_s_actors_share_its_phase_and_each_tells_of_itself() -> None:
    members = [
        member("s", "scheduler", group="decode-0", phase="decode"),
        member("w", "worker", group="decode-0"),
        member("g", "gateway"),
        member("silent", "worker", group="decode-0"),
        member("odd", "custom", group=7, phase=["x"]),
        member("k", "kv_agent"),
    ]
    pulled = {"tcp": 5, "shm": 0}
    unreached = {'mesh_unreached_seconds{peer="kv-agent.p"}': 12.0}
    answers = [
        SCHEDULER._replace(
            stats=msgspec.structs.replace(SCHEDULER.stats, gauges={**SCHEDULER.stats.gauges, **unreached})
        ),
        answer("w", "worker", cpu_cores=0.5, worker_queued_steps=1),
        answer("g", "gateway", gateway_requests_running=5, gateway_requests_waiting=6),
        ActorStats("silent", "worker", 1, None),
        answer("odd", "custom", kv_pulled_bytes_total=7),
        answer("k", "kv_agent", **{f'{PULLED_BYTES[5:]}{{transport="{name}"}}': size for name, size in pulled.items()}),
    ]
    assert actor_figures(members, answers) == {
        "k": ActorFigures(pulled_bytes={"tcp": 5}),
        "s": ActorFigures(
            group="decode-0", phase="decode", cpu_cores=1.5, memory_bytes=3 << 30, num_running=3, num_waiting=6,
            kv_usage=0.25, tokens_per_s=1234.5, output_tokens_per_s=34.5, hit_ratio=0.25, step_s=0.05,
            unreached={"kv-agent.p": 12.0},
        ),
        "w": ActorFigures(group="decode-0", phase="decode", cpu_cores=0.5),
        "g": ActorFigures(num_running=5, num_waiting=6),
        "silent": ActorFigures(group="decode-0", phase="decode"),
        "odd": ActorFigures(),
    }  # fmt: skip


def test_rates_of_what_schedulers_count() -> None:
    results = Mock(num_computed_tokens=40, num_output_tokens=10)
    cache, pipeline = Mock(num_query_tokens=20, num_hit_tokens=5), Mock(last_step=4, steps_s=0.5)
    core = Mock(results=results, books=Mock(cache=cache), pipeline=pipeline)
    rates = {f"{name}_per_second": value for name, value in SchedulerActor.totals(Mock(core=core)).items()}
    told = actor_figures([member("s", "scheduler")], [ActorStats("s", "scheduler", 1, StatsReply({}, rates))])["s"]
    assert (told.tokens_per_s, told.output_tokens_per_s, told.hit_ratio, told.step_s) == (40.0, 10.0, 0.25, 0.125)


def test_without_prompts_there_is_no_share_of_them_that_was_cached() -> None:
    idle = answer("s", "scheduler", scheduler_prefix_query_tokens_per_second=0.0)
    assert actor_figures([member("s", "scheduler")], [idle])["s"].hit_ratio is None


def test_as_people_read_them() -> None:
    figures = actor_figures([member("s", "scheduler", group="decode-0", phase="decode")], [SCHEDULER])["s"]
    assert dict(zip(FIGURE_NAMES, figure_texts(figures), strict=True)) == {
        "GROUP": "decode-0",
        "PHASE": "decode",
        "CPU": "150%",
        "MEMORY": "3.0 GiB",
        "RUNNING": "3",
        "WAITING": "6",
        "KV": "25%",
        "TOKENS/S": "1,234.5",
    }
    assert set(figure_texts(ActorFigures())) == {"-"}
