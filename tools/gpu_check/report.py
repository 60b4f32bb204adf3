"""The table that people read and the JSON that programs read, from the same outcomes and figures (pure)."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.figures import Figure
from tools.gpu_check.plan import Outcome


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the last one as it is."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def text(
    versions: Mapping[str, str], outcomes: Sequence[Outcome], figures: Mapping[str, Sequence[Figure]], taken_s: float
) -> str:
    """Everything, in three tables. `figures` by the name of their step."""
    missing = [name for name, version in versions.items() if version == "missing"]
    measured = [figure for step in figures.values() for figure in step]
    parts = [
        "Versions",
        table([(name, version) for name, version in versions.items()]),
        *([f"missing: {', '.join(missing)}"] if missing else []),
        "",
        "Steps",
        table([(one.name, one.state, f"{one.seconds:.0f} s", one.detail) for one in outcomes]),
        "",
        "Figures",
        table([(one.name, one.value, f"goal {one.goal}" if one.goal else "", one.beside) for one in measured])
        or "none",
        "",
        f"{sum(one.state == 'ok' for one in outcomes)} of {len(outcomes)} steps passed in {taken_s:.0f} s",
    ]
    return "\n".join(parts)


def document(
    versions: Mapping[str, str], outcomes: Sequence[Outcome], figures: Mapping[str, Sequence[Figure]], taken_s: float
) -> dict[str, Any]:
    """The same, for JSON."""
    return {
        "versions": dict(versions),
        "steps": [one._asdict() for one in outcomes],
        "figures": [{"step": step} | one._asdict() for step, found in figures.items() for one in found],
        "seconds": round(taken_s, 1),
    }
