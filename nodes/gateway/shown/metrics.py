"""One `/metrics` page for the whole mesh, in Prometheus' text form. Pure: snapshots in, bytes out.

Every actor's own series get the labels `actor` and `role`, and `host` on a mesh of several hosts. In addition there are
the names that existing dashboards and autoscalers know from vLLM, made from the series of schedulers and gateways by
`GAUGES`, `COUNTERS` and `HISTOGRAMS`, with the label `model_name`.
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.membership.view import SUPERVISOR
from mesh.wire.frames import Histogram, StatsReply
from nodes.actor_figures import KV_USAGE, RUNNING, WAITING
from nodes.roles import ROLES
from nodes.stats import ActorStats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'(?!__)([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)",?', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_RESERVED: Final = ("vllm:", "mesh_actor_")
"""What names begin with that this page gives."""
_COUNTER_ENDS: Final = ("", "_total", "_created")
_HISTOGRAM_ENDS: Final = ("", "_bucket", "_count", "_sum", "_created")


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


GAUGES: Final = (
    ("vllm:num_requests_running", "Requests in running batches.", RUNNING),
    ("vllm:num_requests_waiting", "Requests that wait for a place in a batch or for KV pages.", WAITING),
)
"""A name of vLLM's, its help text, and the series it is the sum of."""
COUNTERS: Final = (
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in prefix caches.",
        "mesh_scheduler_prefix_query_tokens_total",
    ),
    ("vllm:prefix_cache_hits", "Prompt tokens found in prefix caches.", "mesh_scheduler_prefix_hit_tokens_total"),
    (
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that no prefix cache had and that were looked up on disk.",
        "mesh_scheduler_store_query_tokens_total",
    ),
    (
        "vllm:external_prefix_cache_hits",
        "Prompt tokens that were read from the disk.",
        "mesh_scheduler_store_hit_tokens_total",
    ),
    ("vllm:num_preemptions", "Running requests that had to give up their KV pages.", "mesh_preemptions_total"),
    ("vllm:prompt_tokens", "Prompt tokens of requests that ended.", "mesh_prompt_tokens_total"),
    ("vllm:generation_tokens", "Output tokens of requests that ended.", "mesh_generation_tokens_total"),
)
"""A name of vLLM's, its help text, and the series of each actor that it is another name for."""
HISTOGRAMS: Final = (
    (
        "vllm:time_to_first_token_seconds",
        "Time from a request's arrival to its first token.",
        "mesh_time_to_first_token_seconds",
    ),
    (
        "vllm:request_queue_time_seconds",
        "Time that an attempt waited for a place in a batch before its first token.",
        "mesh_request_queue_seconds",
    ),
    (
        "vllm:request_prefill_time_seconds",
        "Time from an attempt's place in a batch to its first token.",
        "mesh_request_prefill_seconds",
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Time between output tokens of a request.",
        "mesh_inter_token_latency_seconds",
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "Time from a request's arrival to its end.",
        "mesh_e2e_request_latency_seconds",
    ),
)


class _Families:
    """The mesh's own families in the making. What would make the page invalid is left out.

    Prometheus refuses a whole scrape for one series that is there twice, or for a name of two types. A custom actor may
    say anything, and must not cost others their figures.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}
        # The family that each sample's name belongs to.
        self._owners: dict[str, str] = {}
        self._seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()

    def add(self, text: str, value: float | Histogram, actor: ActorStats) -> bool:
        """Add one series that an actor said; False if it has no place here."""
        series = parse_series(text)
        if series is None or series.name.startswith(_RESERVED):
            return False
        labels = _labels_said(series.labels, actor)
        if isinstance(value, Histogram):
            kind, name, names = HistogramMetricFamily, series.name, {series.name + end for end in _HISTOGRAM_ENDS}
            is_good = _is_whole(value) and "le" not in labels
        else:
            name = series.name.removesuffix("_total")
            kind, names, is_good = GaugeMetricFamily, {name}, True
            if name != series.name:
                # Without its end, too, as OpenMetrics names the family.
                kind, names = CounterMetricFamily, {name + end for end in _COUNTER_ENDS}
                is_good = name != "" and not name.endswith("_total") and value >= 0
        key = series.name, frozenset(labels.items())
        if not is_good or key in self._seen or any(self._owners.get(one, name) != name for one in names):
            return False
        family = self.by_name.get(name) or kind(name, help_of(name))
        if type(family) is not kind:
            return False
        self._seen.add(key)
        self._owners.update(dict.fromkeys(names, name))
        self.by_name[name] = family
        if isinstance(value, Histogram):
            _add_histogram(family, name, labels, value)
        else:
            family.add_sample(series.name, labels, value)
        return True


class MeshCollector(Collector):
    """Families of one scrape, for prometheus-client."""

    def __init__(self, actors: Sequence[ActorStats], model_name: str) -> None:
        # Roles of ours first: where two actors disagree about a name, the first one has it.
        self._actors = sorted(actors, key=lambda actor: actor.role not in ROLES)
        self._model = {"model_name": model_name}

    def collect(self) -> Iterable[Metric]:
        """All families, each once: those about actors, the mesh's own in the order of their names, then vLLM's."""
        up = GaugeMetricFamily("mesh_actor_up", "Whether the actor answered this scrape.")
        refused = GaugeMetricFamily(
            "mesh_actor_series_refused", "Series that the actor says and that have no place on this page."
        )
        families = _Families()
        for actor in self._actors:
            up.add_sample(up.name, _labels(actor), float(actor.stats is not None))
            if (said := actor.stats) is not None:
                each = (*said.counters.items(), *said.gauges.items(), *said.histograms.items())
                num_refused = sum(not families.add(text, value, actor) for text, value in each)
                refused.add_sample(refused.name, _labels(actor), num_refused)
        yield from (up, refused)
        yield from (families.by_name[name] for name in sorted(families.by_name))
        yield from self._gauges()
        yield from self._others()

    def _gauges(self) -> Iterable[Metric]:
        """Of the whole mesh, as autoscalers want them."""
        said = [{**actor.stats.counters, **actor.stats.gauges} for actor in self._actors if actor.stats is not None]
        for name, help_text, sources in GAUGES:
            gauge = GaugeMetricFamily(name, help_text)
            gauge.add_sample(name, self._model, sum(one.get(source, 0.0) for one in said for source in sources))
            yield gauge
        used = sum(one.get("mesh_scheduler_num_pages", 0.0) * one.get(KV_USAGE, 0.0) for one in said)
        total = sum(one.get("mesh_scheduler_num_pages", 0.0) for one in said)
        # Over all pools, each weighted by its pages.
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        usage.add_sample(usage.name, self._model, used / total if total else 0.0)
        yield usage

    def _others(self) -> Iterable[Metric]:
        """By actor: a sum would fall when one starts again or is silent, and rise by all that it had when it is back.

        `rate()` takes such a rise for as many events.
        """
        for name, help_text, source in COUNTERS:
            counter = CounterMetricFamily(name, help_text)
            for actor, said in self._answers():
                value = said.counters.get(source, said.gauges.get(source))
                if value is not None:
                    counter.add_sample(f"{name}_total", _labels(actor) | self._model, value)
            yield counter
        for name, help_text, source in HISTOGRAMS:
            family = HistogramMetricFamily(name, help_text)
            for actor, said in self._answers():
                histogram = said.histograms.get(source)
                if histogram is not None and _is_whole(histogram):
                    _add_histogram(family, name, _labels(actor) | self._model, histogram)
            yield family

    def _answers(self) -> Iterable[tuple[ActorStats, StatsReply]]:
        return ((actor, actor.stats) for actor in self._actors if actor.stats is not None)


def _labels_said(said: dict[str, str], actor: ActorStats) -> dict[str, str]:
    """An actor's labels for a series, and the page's own, which win: nobody speaks for others but a supervisor.

    As Prometheus does where a target's labels meet its own, those of the same names are kept with `exported_`.
    """
    own = _labels(actor)
    if actor.role == SUPERVISOR:
        return own | said
    return {(f"exported_{name}" if name in own else name): value for name, value in said.items()} | own


def _is_whole(histogram: Histogram) -> bool:
    bounds, counts = histogram.bounds, histogram.counts
    is_rising = all(low < high for low, high in pairwise([*bounds, math.inf]))
    return is_rising and len(counts) == len(bounds) + 1 and min(counts) >= 0 and histogram.total >= 0


def _labels(actor: ActorStats) -> dict[str, str]:
    return {"actor": actor.actor_id, "role": actor.role} | ({"host": actor.host} if actor.host else {})


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
