"""A bench for people: the table of a run, the line of a turn, the ratios of two servers. Pure."""

from collections.abc import Mapping, Sequence

from cli.bench.form import refusal_in
from cli.bench.summary import TIMES, Spread, Summary

HEADER = ("MS", "COUNT", "MEAN", "P50", "P90", "P99", "MAX")
_TURN_NAMES = ("TTFT P50", "P99", "ITL P50", "P99", "E2E P50", "P99 MS", "TOKENS/S", "WHOLE")


def head_lines(summary: Summary) -> list[str]:
    """What stands above the table: requests and tokens."""
    cached = (
        f", {summary.num_cached_tokens / summary.num_prompt_tokens:.0%} cached" if summary.num_cached_tokens else ""
    )
    return [
        f"{summary.num_whole} of {summary.num_requests} requests whole in {summary.wall_s:.1f} s, "
        f"{summary.requests_per_s:.2f}/s",
        f"{summary.num_output_tokens:,} tokens of output, {summary.tokens_per_s:,.1f}/s; "
        f"{summary.num_prompt_tokens:,} of prompts{cached}",
    ]


def rows(summary: Summary) -> list[list[str]]:
    """Those of the table under `HEADER`."""
    spreads: list[tuple[str, Spread | None]] = [(text, getattr(summary, name)) for name, text in TIMES.items()]
    return [[text, *_cells(spread)] for text, spread in spreads]


def foot_lines(summary: Summary) -> list[str]:
    """What stands below the table: failures by kind, and what the client itself did to the figures."""
    lines: list[str] = []
    for kind, count in summary.failures.items():
        example = summary.examples[kind]
        lines.append(f"failed: {count} {kind} ({example})")
        if (refusal := refusal_in(kind, example)) is not None:
            lines.append(f"this server {refusal.what}: {refusal.do}")
    late = "" if summary.late_p99_ms is None else f", sent p99 {summary.late_p99_ms:.1f} ms after due"
    lines.append(f"client: {summary.client_cores:.2f} cores, clock p99 {summary.loop_late_p99_ms:.1f} ms late{late}")
    lines += [f"the client was the limit: {reason}" for reason in summary.client_limits]
    return lines


def turn_line(server: str, summary: Summary) -> str:
    """One run in a line, under `TURN_HEADER`."""
    times = [getattr(summary, name) for name in ("ttft", "itl", "e2e")]
    cells = [_ms(getattr(found, rank)) if found else "-" for found in times for rank in ("p50", "p99")]
    whole = f"{summary.num_whole}/{summary.num_requests}"
    return _turn_text(server, [*cells, f"{summary.tokens_per_s:,.1f}", whole])


def ratio_lines(ratios: Mapping[str, Sequence[float]]) -> list[str]:
    """First over second, each with the least, the median and the greatest of the turns."""
    names = {name: name.replace("_", " ").replace("tokens per s", "tokens/s") for name in ratios}
    return [
        f"{names[name]:<10} {middle:.2f} ({least:.2f} to {greatest:.2f})"
        for name, (least, middle, greatest) in ratios.items()
    ]


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["0", *["-"] * 5]
    return [str(spread.count), *map(_ms, (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))]


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _turn_text(server: str, cells: Sequence[str]) -> str:
    # Printed one by one as turns end: no later line can widen the columns.
    return f"{server:<28}" + "".join(f"{cell:>10}" for cell in cells)


TURN_HEADER = _turn_text("SERVER", _TURN_NAMES)
