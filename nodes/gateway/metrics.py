"""One `/metrics` page for the whole mesh, in Prometheus' text form. Pure: snapshots in, bytes out.

Every actor's own series get the labels `actor` and `role`, and `host` on a mesh of several hosts. In addition there are
the names that existing dashboards and autoscalers know from vLLM, made from the series of schedulers and gateways by
`GAUGES`, `COUNTERS` and `HISTOGRAMS`, with the label `model_name`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.membership.view import SUPERVISOR
from mesh.wire.frames import Histogram, StatsReply
from nodes.actor_figures import KV_USAGE, RUNNING, WAITING
from nodes.stats import ActorStats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)",?', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


class Series(NamedTuple):
    """A series' name and labels."""

    name: str
    labels: dict[str, str]


def parse_series(text: str) -> Series | None:
    """Read `name{label="value",…}`; None if it is not of that form."""
    whole = _SERIES.fullmatch(text)
    if whole is None:
        return None
    labels: dict[str, str] = {}
    rest = whole[2] or ""
    position = 0
    while position < len(rest):
        label = _LABEL.match(rest, position)
        if label is None:
            return None
        labels[label[1]] = _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], label[2])
        position = label.end()
    return Series(whole[1], labels)


_UNITS: Final = {
    "_per_second": "per second",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_cores": "cores",
    "_ratio": "0 to 1",
    "_tokens": "tokens",
    "_pages": "pages",
}
"""What a name's end says of its unit; all others count things."""


def help_of(name: str) -> str:
    """The help text of a series of the mesh's own, without `_total`: what its name says, and the unit."""
    words = name.removeprefix("mesh_").replace("_", " ")
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "number")
    return f"{words[:1].upper()}{words[1:]} of each actor ({unit})."


class _Alias(NamedTuple):
    """A name of vLLM's, its help text, and the series it is the sum of."""

    name: str
    help: str
    sources: tuple[str, ...]


GAUGES = (
    _Alias("vllm:num_requests_running", "Requests in running batches.", RUNNING),
    _Alias(
        "vllm:num_requests_waiting",
        "Requests that wait for a place in a batch or for KV pages.",
        WAITING,
    ),
)
COUNTERS = (
    _Alias(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in prefix caches.",
        ("mesh_scheduler_prefix_query_tokens_total",),
    ),
    _Alias(
        "vllm:prefix_cache_hits", "Prompt tokens found in prefix caches.", ("mesh_scheduler_prefix_hit_tokens_total",)
    ),
    _Alias(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that no prefix cache had and that were looked up on disk.",
        ("mesh_scheduler_store_query_tokens_total",),
    ),
    _Alias(
        "vllm:external_prefix_cache_hits",
        "Prompt tokens that were read from the disk.",
        ("mesh_scheduler_store_hit_tokens_total",),
    ),
    _Alias("vllm:num_preemptions", "Running requests that had to give up their KV pages.", ("mesh_preemptions_total",)),
    _Alias("vllm:prompt_tokens", "Prompt tokens of requests that ended.", ("mesh_prompt_tokens_total",)),
    _Alias("vllm:generation_tokens", "Output tokens of requests that ended.", ("mesh_generation_tokens_total",)),
)
HISTOGRAMS = (
    _Alias(
        "vllm:time_to_first_token_seconds",
        "Time from a request's arrival to its first token.",
        ("mesh_time_to_first_token_seconds",),
    ),
    _Alias(
        "vllm:request_queue_time_seconds",
        "Time that an attempt waited for a place in a batch before its first token.",
        ("mesh_request_queue_seconds",),
    ),
    _Alias(
        "vllm:request_prefill_time_seconds",
        "Time from an attempt's place in a batch to its first token.",
        ("mesh_request_prefill_seconds",),
    ),
    _Alias(
        "vllm:inter_token_latency_seconds",
        "Time between output tokens of a request.",
        ("mesh_inter_token_latency_seconds",),
    ),
    _Alias(
        "vllm:e2e_request_latency_seconds",
        "Time from a request's arrival to its end.",
        ("mesh_e2e_request_latency_seconds",),
    ),
)


class MeshCollector(Collector):
    """Families of one scrape, for prometheus-client."""

    def __init__(self, actors: Sequence[ActorStats], model_name: str) -> None:
        self._actors = actors
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """All families, each once: the mesh's own in the order of their names, then vLLM's."""
        families = {"mesh_actor_up": self._up()}
        for actor in self._actors:
            if actor.stats is not None:
                self._add(families, actor, actor.stats)
        yield from (families[name] for name in sorted(families))
        yield from self._aliases()

    def _up(self) -> Metric:
        up = GaugeMetricFamily("mesh_actor_up", "Whether the actor answered this scrape.")
        for actor in self._actors:
            up.add_sample("mesh_actor_up", _labels(actor), float(actor.stats is not None))
        return up

    def _add(self, families: dict[str, Metric], actor: ActorStats, stats: StatsReply) -> None:
        own = _labels(actor)
        for text, value in (*stats.counters.items(), *stats.gauges.items()):
            series = parse_series(text)
            if series is None:
                continue
            is_counter = series.name.endswith("_total")
            name = series.name.removesuffix("_total")
            kind: Callable[[str, str], Metric] = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = families.setdefault(series.name, kind(name, help_of(name)))
            # A supervisor's series are about the actors that its labels name; no other actor may speak for others.
            labels = own | series.labels if actor.role == SUPERVISOR else series.labels | own
            family.add_sample(series.name, labels, value)
        for text, histogram in stats.histograms.items():
            series = parse_series(text)
            if series is not None:
                family = families.setdefault(series.name, HistogramMetricFamily(series.name, help_of(series.name)))
                _add_histogram(family, series.name, {**series.labels, **own}, histogram)

    def _aliases(self) -> Iterable[Metric]:
        label = {"model_name": self._model_name}
        sums = self._sums()
        for alias in GAUGES:
            gauge = GaugeMetricFamily(alias.name, alias.help)
            gauge.add_sample(alias.name, label, sum(sums.get(source, 0.0) for source in alias.sources))
            yield gauge
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        usage.add_sample("vllm:kv_cache_usage_perc", label, self._kv_usage())
        yield usage
        for alias in COUNTERS:
            counter = CounterMetricFamily(alias.name, alias.help)
            value = sum(sums.get(source, 0.0) for source in alias.sources)
            counter.add_sample(f"{alias.name}_total", label, value)
            yield counter
        for alias in HISTOGRAMS:
            family = HistogramMetricFamily(alias.name, alias.help)
            merged = merge_histograms(self._histograms(alias.sources))
            if merged is not None:
                _add_histogram(family, alias.name, label, merged)
            yield family

    def _sums(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for actor in self._actors:
            if actor.stats is not None:
                for text, value in (*actor.stats.counters.items(), *actor.stats.gauges.items()):
                    name = text.partition("{")[0]
                    sums[name] = sums.get(name, 0.0) + value
        return sums

    def _kv_usage(self) -> float:
        """Over all pools, each weighted by its pages."""
        used = total = 0.0
        for actor in self._actors:
            if actor.stats is not None:
                num_pages = actor.stats.gauges.get("mesh_scheduler_num_pages", 0.0)
                used += num_pages * actor.stats.gauges.get(KV_USAGE, 0.0)
                total += num_pages
        return used / total if total else 0.0

    def _histograms(self, names: tuple[str, ...]) -> list[Histogram]:
        return [
            histogram
            for actor in self._actors
            if actor.stats is not None
            for text, histogram in actor.stats.histograms.items()
            if text.partition("{")[0] in names
        ]


def _labels(actor: ActorStats) -> dict[str, str]:
    return {"actor": actor.actor_id, "role": actor.role} | ({"host": actor.host} if actor.host else {})


def merge_histograms(histograms: Sequence[Histogram]) -> Histogram | None:
    """The sum of histograms; those whose bounds differ from the first one's are left out. None if there are none."""
    if not histograms:
        return None
    bounds = histograms[0].bounds
    alike = [histogram for histogram in histograms if histogram.bounds == bounds]
    counts = [sum(column) for column in zip(*(histogram.counts for histogram in alike), strict=True)]
    return Histogram(bounds=bounds, counts=counts, total=sum(histogram.total for histogram in alike))


def _add_histogram(family: Metric, name: str, labels: dict[str, str], histogram: Histogram) -> None:
    seen = 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        seen += count
        text = "+Inf" if bound == float("inf") else repr(bound)
        family.add_sample(f"{name}_bucket", {**labels, "le": text}, seen)
    family.add_sample(f"{name}_count", labels, seen)
    family.add_sample(f"{name}_sum", labels, histogram.total)


def render(actors: Sequence[ActorStats], model_name: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MeshCollector(actors, model_name))
    return generate_latest(registry)
