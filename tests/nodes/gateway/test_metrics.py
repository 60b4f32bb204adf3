"""The page of `/metrics`, read back by prometheus-client's own parser."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mesh.address import Endpoint
from mesh.membership.view import Member
from mesh.runtime.telemetry import Metrics, series
from mesh.wire.frames import Histogram, StatsReply
from nodes.gateway.config import GatewayConfig
from nodes.gateway.metrics import help_of, merge_histograms, parse_series, render
from nodes.gateway.page.shown import mesh_shown
from nodes.stats import ActorStats, hosts_of, silent_hosts


def samples(actors: list[ActorStats]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = render(actors, "tiny").decode()
    families = list(text_string_to_metric_families(page))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "each family once"
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def scheduler(actor_id: str, **gauges: float) -> ActorStats:
    named = {f"mesh_scheduler_{name}": value for name, value in gauges.items()}
    return ActorStats(actor_id, "scheduler", 1, StatsReply(counters={}, gauges=named))


MODEL = (("model_name", "tiny"),)


def test_of_several_hosts_each_series_says_which_and_silent_ones_are_known() -> None:
    def member(actor_id: str, host: str) -> Member:
        return Member(actor_id, "worker", 1, Endpoint("", ""), host=host)

    assert hosts_of([member("w0", "computer"), member("registry", "computer")]) == {}
    hosts = hosts_of([member("w0.d", ""), member("registry", "head")])
    assert hosts == {"w0.d": "d", "registry": "head"}
    gone = ActorStats("w0.d", "worker", 1, None, hosts["w0.d"])
    there = ActorStats("registry", "registry", 1, Metrics().snapshot({"mesh_x": 1.0}), hosts["registry"])
    assert silent_hosts([gone, there]) == ["d"]
    found = samples([gone, there])
    assert found[("mesh_actor_up", (("actor", "w0.d"), ("host", "d"), ("role", "worker")))] == 0
    assert found[("mesh_x", (("actor", "registry"), ("host", "head"), ("role", "registry")))] == 1
    config, members = GatewayConfig(model_name="m", context_length=1), [member("w0.d", ""), member("registry", "head")]
    shown = mesh_shown(config, "g", 1.0, members, [gone, there], [])
    assert shown.silent == ["d"]
    assert [(one.id, one.host, one.answers) for one in shown.actors] == [
        ("w0.d", "d", False),
        ("registry", "head", True),
    ]


def test_every_actor_s_series_with_their_labels() -> None:
    metrics = Metrics()
    metrics.count("mesh_frames_refused_total", 3, code='bad"\n\\')
    metrics.observe("mesh_x_seconds", 0.2)
    actors = [
        ActorStats("w0", "worker", 2, metrics.snapshot({'mesh_pages{state="free"}': 4.0, "mesh_killed_total": 2.0})),
        ActorStats("w1", "worker", 1, None),
        ActorStats("w2", "worker", 1, metrics.snapshot({"not a name": 1.0})),
    ]
    found = samples(actors)
    own = (("actor", "w0"), ("role", "worker"))
    assert found[("mesh_actor_up", own)] == 1
    assert found[("mesh_actor_up", (("actor", "w1"), ("role", "worker")))] == 0
    assert found[("mesh_frames_refused_total", (own[0], ("code", 'bad"\n\\'), own[1]))] == 3
    assert (found[("mesh_pages", (*own, ("state", "free")))], found[("mesh_killed_total", own)]) == (4, 2)
    assert found[("mesh_x_seconds_count", own)] == 1
    assert found[("mesh_x_seconds_bucket", (own[0], ("le", "0.25"), own[1]))] == 1
    assert found[("mesh_x_seconds_bucket", (own[0], ("le", "0.1"), own[1]))] == 0
    assert found[("mesh_x_seconds_bucket", (own[0], ("le", "+Inf"), own[1]))] == 1


def test_what_a_supervisor_counts_is_about_the_actor_that_it_names_and_nobody_else_speaks_for_others() -> None:
    metrics = Metrics()
    metrics.count("mesh_supervisor_deaths_total", actor="w0", role="worker", reason="SIGSEGV")
    found = samples(
        [
            ActorStats("supervisor", "supervisor", 1, metrics.snapshot()),
            ActorStats("impostor", "custom", 1, metrics.snapshot()),
        ]
    )
    name, reason = "mesh_supervisor_deaths_total", ("reason", "SIGSEGV")
    assert found[(name, (("actor", "w0"), reason, ("role", "worker")))] == 1
    assert found[(name, (("actor", "impostor"), reason, ("role", "custom")))] == 1


def test_names_that_dashboards_know() -> None:
    gateway = Metrics()
    gateway.count("mesh_prompt_tokens_total", 10)
    gateway.count("mesh_generation_tokens_total", 20)
    gateway.observe("mesh_time_to_first_token_seconds", 0.2)
    stages = Metrics()
    stages.observe("mesh_request_queue_seconds", 3.0)
    stages.observe("mesh_request_prefill_seconds", 200.0)
    actors = [
        scheduler("d0", num_running=3, num_waiting=1, num_handoffs=2, num_pages=30, kv_usage_ratio=0.5),
        scheduler("d1", num_running=2, num_pages=10, kv_usage_ratio=0.1, prefix_query_tokens_total=50),
        scheduler("d4", store_query_tokens_total=64, store_hit_tokens_total=48),
        ActorStats("d2", "scheduler", 1, StatsReply(counters={"mesh_preemptions_total": 4}, gauges={})),
        ActorStats("g0", "gateway", 1, gateway.snapshot()),
        ActorStats("g1", "gateway", 1, gateway.snapshot()),
        ActorStats("gone", "gateway", 1, None),
        ActorStats("d3", "scheduler", 1, stages.snapshot()),
    ]
    found = samples(actors)
    expected = {
        "vllm:request_queue_time_seconds_sum": 3.0,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:num_requests_running": 5,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.4,
        "vllm:prefix_cache_queries_total": 50,
        "vllm:prefix_cache_hits_total": 0,
        "vllm:external_prefix_cache_queries_total": 64,
        "vllm:external_prefix_cache_hits_total": 48,
        "vllm:num_preemptions_total": 4,
        "vllm:prompt_tokens_total": 20,
        "vllm:generation_tokens_total": 40,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:time_to_first_token_seconds_sum": 0.4,
    }
    assert {name: found[(name, MODEL)] for name in expected} == pytest.approx(expected)


def test_an_empty_mesh_has_a_page() -> None:
    found = samples([])
    assert found[("vllm:kv_cache_usage_perc", MODEL)] == 0


@pytest.mark.parametrize("labels", [{}, {"a": "b"}, {"a": 'x"\\\n}{,=', "b": ""}])
def test_series_are_read_as_they_are_written(labels: dict[str, str]) -> None:
    read = parse_series(series("mesh_x", labels))
    assert (read.name, read.labels) == ("mesh_x", labels)


@pytest.mark.parametrize("text", ["", "9x", "a b", "a{", 'a{b="c"', "a{b=c}", 'a{="c"}', 'a{b="c"} '])
def test_what_is_no_series(text: str) -> None:
    assert parse_series(text) is None


def test_histograms_of_other_bounds_are_left_out() -> None:
    one: Any = Histogram(bounds=[1.0], counts=[1, 2], total=3.0)
    other = Histogram(bounds=[2.0], counts=[5, 5], total=5.0)
    assert merge_histograms([]) is None
    assert merge_histograms([one, other, one]) == Histogram(bounds=[1.0], counts=[2, 4], total=6.0)


def test_series_of_no_form_are_left_out_of_histograms() -> None:
    reply = StatsReply(counters={}, gauges={}, histograms={"a b": Histogram(bounds=[1.0], counts=[1, 2], total=3.0)})
    assert samples([ActorStats("x", "y", 1, reply)])


def test_help_texts_say_the_unit() -> None:
    assert help_of("mesh_request_queue_seconds") == "Request queue seconds of each actor (seconds)."
    assert help_of("mesh_scheduler_computed_tokens_per_second").endswith("(per second).")
    assert help_of("mesh_scheduler_kv_usage_ratio").endswith("(0 to 1).")
    assert help_of("mesh_preemptions").endswith("(number).")
