"""The page of `/metrics`, read back by prometheus-client's own parser."""

import math
from random import Random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_page
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from mesh.address import Endpoint
from mesh.membership.view import Member
from mesh.runtime.telemetry import Metrics, series
from mesh.wire.frames import Histogram, StatsReply
from nodes.gateway.config import GatewayConfig
from nodes.gateway.page.shown import mesh_shown
from nodes.gateway.shown.metrics import MeshCollector, help_of, parse_series, render
from nodes.stats import ActorStats, hosts_of, silent_hosts
from tests.nodes.gateway.exposition import only_rising, what_is_invalid


def samples(actors: list[ActorStats]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = render(actors, "tiny").decode()
    assert what_is_invalid(page) == []
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
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
    exported = (("exported_actor", "w0"), ("exported_role", "worker"))
    assert found[(name, (("actor", "impostor"), *exported, reason, ("role", "custom")))] == 1


_NAMES = (
    "mesh_x", "mesh_x_total", "mesh_x_bucket", "mesh_x_count", "mesh_x_total_total", "_total", "mesh_x_created",
    "mesh_actor_up", "vllm:num_requests_running", "mesh_uptime_seconds", "mesh_preemptions_total",
)  # fmt: skip
_LABEL_NAMES = ("actor", "role", "host", "le", "a", "exported_role", "__name__")


def said_by_anybody(random: Random) -> StatsReply:
    def some_series() -> str:
        labels = {random.choice(_LABEL_NAMES): random.choice(("", "0.1", "x")) for _ in range(random.randrange(3))}
        return series(random.choice(_NAMES), labels)

    def some_values() -> dict[str, float]:
        values = (0.0, -1.5, 2.0, 1e300, math.nan, math.inf)
        return {some_series(): random.choice(values) for _ in range(random.randrange(6))}

    def histogram() -> Histogram:
        bounds = [random.choice((0.1, 1.0, 1e300, math.inf, math.nan)) for _ in range(random.randrange(3))]
        counts = [random.randrange(-1, 5) for _ in range(random.choice((len(bounds) + 1, 0, 2)))]
        return Histogram(bounds=bounds, counts=counts, total=random.choice((0.0, 1.5, math.nan)))

    histograms = {some_series(): histogram() for _ in range(random.randrange(6))}
    return StatsReply(counters=some_values(), gauges=some_values(), histograms=histograms)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_actors_say_the_page_is_one_that_prometheus_takes(seed: int) -> None:
    random = Random(seed)
    roles = random.choices(("custom", "worker", "supervisor"), k=random.randrange(4))
    said = [(role, random.choice((None, said_by_anybody(random)))) for role in roles]
    own = StatsReply(counters={"mesh_preemptions_total": 2.0}, gauges={"mesh_uptime_seconds": 3.0})
    actors = [ActorStats(f"a{number}", role, 1, stats) for number, (role, stats) in enumerate(said)]
    found = samples([*actors, ActorStats("s", "scheduler", 1, own)])
    registry = CollectorRegistry()
    registry.register(MeshCollector(actors, "tiny"))
    assert list(openmetrics_families(openmetrics_page(registry).decode()))
    if not any(role == "worker" or role == "supervisor" for role, _ in said):
        labels = (("actor", "s"), ("role", "scheduler"))
        assert found[("mesh_preemptions_total", labels)] == 2.0, "no custom actor takes its place"
        assert found[("mesh_uptime_seconds", labels)] == 3.0
    for actor in actors:
        if actor.stats is not None and actor.role != "supervisor":
            num_shown = sum(dict(labels).get("actor") == actor.actor_id for _, labels in found)
            num_said = sum(map(len, (actor.stats.counters, actor.stats.gauges, actor.stats.histograms)))
            (refused,) = [
                value for (name, labels), value in found.items()
                if name == "mesh_actor_series_refused" and ("actor", actor.actor_id) in labels
            ]  # fmt: skip
            assert num_shown >= num_said - refused, "nothing is left out in silence"


def test_a_label_of_the_page_s_own_is_kept_under_another_name() -> None:
    stats = StatsReply(counters={}, gauges={f'mesh_x{{role="{role}"}}': 1.0 for role in ("a", "b")})
    found = samples([ActorStats("registry", "registry", 1, stats)])
    own = (("actor", "registry"), ("role", "registry"))
    assert [found[("mesh_x", (own[0], ("exported_role", role), own[1]))] for role in ("a", "b")] == [1, 1]


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
    whole = {
        "vllm:num_requests_running": 5,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.4,
    }
    assert {name: found[(name, MODEL)] for name in whole} == pytest.approx(whole)
    by_actor = {
        ("vllm:request_queue_time_seconds_sum", "d3"): 3.0,
        ("vllm:request_prefill_time_seconds_count", "d3"): 1,
        ("vllm:prefix_cache_queries_total", "d1"): 50,
        ("vllm:external_prefix_cache_queries_total", "d4"): 64,
        ("vllm:external_prefix_cache_hits_total", "d4"): 48,
        ("vllm:num_preemptions_total", "d2"): 4,
        ("vllm:prompt_tokens_total", "g0"): 10,
        ("vllm:prompt_tokens_total", "g1"): 10,
        ("vllm:generation_tokens_total", "g0"): 20,
        ("vllm:time_to_first_token_seconds_count", "g1"): 1,
        ("vllm:time_to_first_token_seconds_sum", "g0"): 0.2,
    }
    told = {(name, dict(labels).get("actor")): value for (name, labels), value in found.items()}
    assert {key: told[key] for key in by_actor} == pytest.approx(by_actor)
    assert ("vllm:prefix_cache_queries_total", "d0") not in told


def test_no_counter_falls_because_an_actor_is_silent() -> None:
    busy, other = Metrics(), Metrics()
    busy.count("mesh_prompt_tokens_total", 1000)
    other.count("mesh_prompt_tokens_total", 10)
    before = render(
        [ActorStats("g0", "gateway", 1, busy.snapshot()), ActorStats("g1", "gateway", 1, other.snapshot())], "m"
    )
    after = render([ActorStats("g0", "gateway", 1, None), ActorStats("g1", "gateway", 1, other.snapshot())], "m")
    now = only_rising(after.decode())
    assert all(now.get(key, value) >= value for key, value in only_rising(before.decode()).items())


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


def test_series_of_no_form_are_left_out_of_histograms() -> None:
    reply = StatsReply(counters={}, gauges={}, histograms={"a b": Histogram(bounds=[1.0], counts=[1, 2], total=3.0)})
    assert samples([ActorStats("x", "y", 1, reply)])


def test_help_texts_say_the_unit() -> None:
    assert help_of("mesh_request_queue_seconds") == "Request queue seconds of each actor (seconds)."
    assert help_of("mesh_scheduler_computed_tokens_per_second").endswith("(per second).")
    assert help_of("mesh_scheduler_kv_usage_ratio").endswith("(0 to 1).")
    assert help_of("mesh_preemptions").endswith("(number).")
