"""What is wrong with a page of `/metrics`, by prometheus-client's parser and by what Prometheus itself refuses."""

import re
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Key = tuple[str, tuple[tuple[str, str], ...]]
_UNIT = re.compile(r"(bytes|seconds|ratio|cores|tokens|pages)")
_UNIT_ENDS = re.compile(r"_(bytes|seconds|ratio|cores|tokens|pages)(_per_second)?$|_per_second$")
# What is counted here is a page, or a text of tokens, not its pages or tokens.
_NO_AMOUNT = re.compile(r"mesh_(gateway_pages|scheduler_(pages_of|pages_to|page_|num_)|kv_pages_in|prompt_tokens_prep)")


def keyed(sample: Sample) -> Key:
    return sample.name, tuple(sorted(sample.labels.items()))


def what_is_invalid(page: str) -> list[str]:
    """Whatever would cost a scrape; empty if all is well."""
    families = list(text_string_to_metric_families(page))
    lines = Counter(line for line in page.splitlines() if line.startswith("#"))
    told = Counter(" ".join(line.split(" ")[:3]) for line in lines.elements())
    wrong = [f"{number} times {line}" for line, number in told.items() if number > 1]
    names = Counter(family.name for family in families)
    wrong += [f"{number} families {name}" for name, number in names.items() if number > 1]
    keys = Counter(keyed(sample) for family in families for sample in family.samples)
    wrong += [f"{number} times {key}" for key, number in keys.items() if number > 1]
    for family in families:
        if family.type not in ("counter", "gauge", "histogram") or not family.documentation:
            wrong.append(f"{family.name} is {family.type}: {family.documentation!r}")
        if family.type == "histogram":
            wrong += _wrong_histograms(family)
    return wrong


def badly_named(page: str) -> list[str]:
    """Series of the mesh's own whose names do not end in their unit, or in `_total` if they are counters."""
    return [
        family.name
        for family in text_string_to_metric_families(page)
        if (family.type == "histogram" and not family.name.endswith("_seconds"))
        or (
            family.name.startswith("mesh_")
            and _UNIT.search(family.name)
            and not _UNIT_ENDS.search(family.name)
            and not _NO_AMOUNT.match(family.name)
        )
    ]


def only_rising(page: str) -> dict[Key, float]:
    """What may not fall from one scrape to the next: counters, buckets and counts."""
    return {
        keyed(sample): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }


def _wrong_histograms(family: Metric) -> Iterator[str]:
    by_labels: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "le"))
        end = sample.labels.get("le", sample.name.removeprefix(family.name))
        by_labels.setdefault(labels, {})[end] = sample.value
    for labels, found in by_labels.items():
        buckets = [value for end, value in found.items() if end[0] != "_"]
        if buckets != sorted(buckets) or found.get("+Inf") != found.get("_count") or "_sum" not in found:
            yield f"{family.name} {labels} has {found}"
