"""A small chart of latencies as SVG: for each time, which share of the values was at or below it. Pure."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from cli.bench.summary import TIMES

_SHOWN: Final = ("ttft", "itl", "e2e")
_WIDTH, _HEIGHT = 280, 180
_LEFT, _TOP, _GAP = 44, 54, 56
_MOST_POINTS: Final = 200
"""A curve of 256 streams has tens of thousands of values, and 280 pixels to show them on."""
_DASHES: Final = ("", "6 4", "2 3", "8 3 2 3")
_STYLE: Final = (
    "svg{font:12px system-ui,sans-serif;background:#fff;color:#222}"
    "text{fill:currentColor}.grid{stroke:#8884}.axis{stroke:#8888}.curve{fill:none;stroke-width:2}"
    ".c0{stroke:#1668c7}.c1{stroke:#c4570c}.c2{stroke:#2a8a3e}.c3{stroke:#8a3ea8}"
    "@media(prefers-color-scheme:dark){svg{background:#16181c;color:#ddd}"
    ".c0{stroke:#6ab0ff}.c1{stroke:#ffa05a}.c2{stroke:#6fd08a}.c3{stroke:#d49af0}}"
)


def chart(title: str, servers: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """One curve a server in each panel; values in milliseconds by the names of `TIMES`, up to four servers."""
    width = _LEFT + len(_SHOWN) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 44 + 18 * len(servers)
    panels = "".join(
        _panel(_LEFT + number * (_WIDTH + _GAP), TIMES[name], [values[name] for values in servers.values()])
        for number, name in enumerate(_SHOWN)
    )
    legend = "".join(
        f'<line class="curve c{number}" x1="{_LEFT}" x2="{_LEFT + 30}" y1="{y - 4}" y2="{y - 4}"{_dash(number)}/>'
        f'<text x="{_LEFT + 38}" y="{y}">{escape(name)}</text>'
        for number, name in enumerate(servers)
        for y in [_TOP + _HEIGHT + 50 + 18 * number]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><style>{_STYLE}</style>'
        f'<text x="{_LEFT}" y="22" font-weight="600">{escape(title)}</text>{panels}{legend}</svg>\n'
    )


def _panel(left: float, heading: str, curves: Sequence[Sequence[float]]) -> str:
    parts = [f'<g transform="translate({left} {_TOP})"><text y="-10">{heading}, ms: share of values at or below</text>']
    for percent in (0, 50, 90, 99):
        y = _HEIGHT * (1 - percent / 100)
        parts.append(f'<line class="grid" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        # 99 % would be written over 100 % and 90 %; its line is enough.
        if percent != 99:
            parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    # Zero has no place on a logarithmic axis, and a millisecond less does not matter to anybody.
    shown = [max(value, 0.01) for curve in curves for value in curve]
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    scale = _WIDTH / max(math.log10(high / low), 0.01)
    for tick in ticks:
        x = math.log10(tick / low) * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y2="{_HEIGHT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line class="axis" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}"/>')
    for number, curve in enumerate(curves):
        points = " ".join(
            f"{math.log10(max(value, 0.01) / low) * scale:.1f},{_HEIGHT * (1 - share):.1f}"
            for value, share in _steps(curve)
        )
        parts.append(f'<polyline class="curve c{number % 4}" points="{points}"{_dash(number)}/>')
    return "".join([*parts, "</g>"])


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    ranked = sorted(values)
    last = len(ranked) - 1
    ranks = sorted({round(number * last / _MOST_POINTS) for number in range(_MOST_POINTS + 1)}) if ranked else []
    return [(ranked[rank], (rank + 1) / len(ranked)) for rank in ranks]


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or of these the powers alone if there are many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(exponents) <= 3 else (1,)
    found = [step * 10.0**exponent for exponent in exponents for step in steps]
    within = [tick for tick in found if low <= tick <= high]
    return within if len(within) > 1 else [found[0], found[-1]]


def _dash(number: int) -> str:
    # Not by colour alone.
    dashes = _DASHES[number % len(_DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""
