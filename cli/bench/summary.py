"""What a run showed: percentiles with counts, tokens by usage, failures by kind, and how the client did. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from cli.bench.answer import Sample
from cli.bench.loops import Run

_BUSY_CORES: Final = 0.8
"""The client has one thread: from there on what it measures is itself."""
_LATE_MS: Final = 20.0
"""A scheduler's time slice or two; times are wrong by as much as the client is late."""
_LATE_SHARE: Final = 0.1
"""Of the median TTFT: what is wrong by less is right enough."""

TIMES: Final = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
"""Fields of `Summary` with times, and their headings: first token, gaps between events with text, from the first token
to the last over tokens less one, the whole answer."""


class Spread(msgspec.Struct, frozen=True):
    """Of `count` values, in milliseconds. Percentiles are values that were seen, the nearest at or above the rank."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """One run, or several in one. Times and tokens are those of whole answers; a spread is None if it has no values.

    `failures` counts by kind, `examples` has what was seen of each. `client_cores` is how many cores the client kept
    busy, `late_p99_ms` how late it sent what was due (None in a closed loop), `loop_late_p99_ms` how late its event
    loop was; `client_limits` says, where it is so, that the client was the limit and not the server.
    """

    num_requests: int
    num_whole: int
    wall_s: float
    requests_per_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_s: float
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    failures: dict[str, int]
    examples: dict[str, str]
    client_cores: float
    late_p99_ms: float | None
    loop_late_p99_ms: float
    client_limits: list[str]


def summarize(*runs: Run) -> Summary:
    """All runs as one."""
    # What still runs when a bench is broken off has no times yet, and has not failed.
    samples = [sample for run in runs for sample in run.samples if sample.end_s]
    whole = [sample for sample in samples if sample.is_whole]
    failed = [sample for sample in samples if sample.failure]
    wall_s = sum(run.wall_s for run in runs)
    values = times_ms(whole)
    spreads = {name: spread(values[name]) for name in TIMES}
    num_output = sum(sample.num_tokens for sample in whole)
    cores = sum(run.cpu_s for run in runs) / wall_s if wall_s else 0.0
    late = spread([1e3 * late_s for run in runs for late_s in run.late_s])
    loop_late = spread([1e3 * late_s for run in runs for late_s in run.loop_late_s])
    late_ms, loop_late_ms = late.p99 if late else None, loop_late.p99 if loop_late else 0.0
    num_not_sent = sum(sample.failure == "not_sent" for sample in failed)
    return Summary(
        num_requests=len(samples),
        num_whole=len(whole),
        wall_s=wall_s,
        requests_per_s=len(whole) / wall_s if wall_s else 0.0,
        num_prompt_tokens=sum(sample.num_prompt_tokens for sample in whole),
        num_cached_tokens=sum(sample.num_cached_tokens for sample in whole),
        num_output_tokens=num_output,
        tokens_per_s=num_output / wall_s if wall_s else 0.0,
        **spreads,
        failures=dict(Counter(sample.failure for sample in failed).most_common()),
        examples={sample.failure: sample.detail for sample in reversed(failed)},
        client_cores=cores,
        late_p99_ms=late_ms,
        loop_late_p99_ms=loop_late_ms,
        client_limits=_limits(cores, late_ms, loop_late_ms, num_not_sent, spreads["ttft"]),
    )


def times_ms(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """All values of each of `TIMES`, in milliseconds; `samples` are whole answers."""
    # An answer of special tokens alone has none, and one of a single token no pace.
    with_text = [sample for sample in samples if sample.event_times_s]
    several = [sample for sample in with_text if sample.num_tokens > 1]
    return {
        "ttft": [1e3 * (sample.event_times_s[0] - sample.start_s) for sample in with_text],
        "itl": [1e3 * (b - a) for sample in with_text for a, b in itertools.pairwise(sample.event_times_s)],
        "tpot": [1e3 * (s.event_times_s[-1] - s.event_times_s[0]) / (s.num_tokens - 1) for s in several],
        "e2e": [1e3 * (sample.end_s - sample.start_s) for sample in samples],
    }


def spread(values: Sequence[float]) -> Spread | None:
    """None if there are no values."""
    if not values:
        return None
    ranked = sorted(values)
    p50, p90, p99 = (ranked[max(0, math.ceil(share * len(ranked)) - 1)] for share in (0.5, 0.9, 0.99))
    return Spread(len(ranked), sum(ranked) / len(ranked), p50, p90, p99, ranked[-1])


def ratios(pairs: Sequence[tuple[Summary, Summary]]) -> dict[str, tuple[float, float, float]]:
    """Least, median and greatest ratio of the first to the second, for times and tokens/s that all runs have."""
    found: dict[str, tuple[float, float, float]] = {}
    for name in (*(f"{time}_{rank}" for time in TIMES for rank in ("p50", "p99")), "tokens_per_s"):
        both = [(_value(one, name), _value(other, name)) for one, other in pairs]
        if both and all(one is not None and other for one, other in both):
            ranked = sorted((one or 0.0) / other for one, other in both if other)
            found[name] = (ranked[0], _median(ranked), ranked[-1])
    return found


def _median(ranked: Sequence[float]) -> float:
    half = len(ranked) // 2
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def _value(summary: Summary, name: str) -> float | None:
    if name == "tokens_per_s":
        return summary.tokens_per_s
    time, _, rank = name.partition("_")
    found: Spread | None = getattr(summary, time)
    return None if found is None else float(getattr(found, rank))


def _limits(
    cores: float, late_ms: float | None, loop_late_ms: float, num_not_sent: int, ttft: Spread | None
) -> list[str]:
    found: list[str] = []
    matters_ms = max(_LATE_MS, _LATE_SHARE * ttft.p50 if ttft is not None else 0.0)
    if cores >= _BUSY_CORES:
        found.append(f"it kept {cores:.2f} cores busy, and has one thread")
    if late_ms is not None and late_ms >= matters_ms:
        found.append(f"1 % of the requests were sent {late_ms:.0f} ms or more after they were due")
    if loop_late_ms >= matters_ms:
        found.append(f"1 % of its looks at the clock were {loop_late_ms:.0f} ms or more late")
    if num_not_sent:
        found.append(f"{num_not_sent} requests were not sent, since as many as it may have were open")
    return found
