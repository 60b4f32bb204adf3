"""Counters begin at 0: of a series that begins with its first event, `increase()` does not see that event."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mesh.errors import JOIN_CODES, PROOF_CODES, REFUSAL_CODES
from mesh.runtime.telemetry import Metrics
from nodes.protocol.steps import ROW_ERRORS, RowError
from nodes.worker.core import STEP_REFUSALS

ROOT = Path(__file__).parents[2]
OPEN = {
    "mesh_handler_errors_total": "names of handlers, timers and tasks",
    "mesh_unhandled_total": "types of messages, as peers send them",
    "mesh_supervisor_core_failures_total": "whatever cores an actor has",
}
"""Counted by labels of which nobody knows all values before they come."""
BEGUN_BY_NAME = {
    # In gauges, where each figure is there from the start.
    "mesh_scheduler_requests_total": "all outcomes are written out",
    "mesh_scheduler_handoffs_total": "all outcomes are written out",
    "mesh_scheduler_orders_total": "all outcomes are written out",
    "mesh_scheduler_restores_total": "all outcomes are written out, where there is a disk",
    "mesh_scheduler_results_refused_total": "tests/nodes/scheduler, `num_refused` has all reasons",
    "mesh_kv_transfer_failures_total": "tests/kvstore/transfer/test_failures.py",
    "mesh_kv_disk_dropped_pages_total": "tests/nodes/kv_agent/test_disk.py: all reasons are written out",
    "mesh_kv_store_calls_total": "`nodes/kv_agent/stores/facts.py` has all calls and outcomes",
    "mesh_kv_connections_refused_total": "tests/kvstore/transfer/test_failures.py",
    "mesh_otel_calls_total": "`SpanExport.figures` has all outcomes",
    "mesh_supervisor_suspicions_total": "tests/cli/test_record.py",
    "mesh_supervisor_kills_total": "tests/cli/test_record.py",
    "mesh_supervisor_give_ups_total": "tests/cli/test_record.py",
}
_NAME = re.compile(r"mesh_[a-z0-9_]+_total")


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    files = [path for package in ("mesh", "kvstore", "nodes", "cli") for path in (ROOT / package).rglob("*.py")]
    return [(path, ast.parse(path.read_text())) for path in files]


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            yield getattr(called, "attr", getattr(called, "id", "")), node


def strings(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def test_every_counter_begins_at_0() -> None:
    counted: dict[str, Path] = {}
    begun: set[str] = set()
    for path, tree in trees():
        for called, call in calls(tree):
            if called in ("count", "_count"):
                counted |= {name: path for one in call.args[:1] for name in strings(one) if _NAME.fullmatch(name)}
            elif called == "begin":
                begun |= {name for one in call.args for name in strings(one)}
        # Figures with labels in gauges: `mesh_x_total{label="value"}`, written out or made.
        for text in strings(tree):
            if (found := _NAME.match(text)) is not None and text[found.end() : found.end() + 1] == "{":
                counted[found[0]] = path
    assert len(counted) > 35, "the patterns still find them"
    missing = {name: str(path) for name, path in counted.items() if name not in {*begun, *OPEN, *BEGUN_BY_NAME}}
    assert not missing, "let each begin at 0 (`Metrics.begin`) when its actor starts, or say here why it cannot"


def literals_of(raised: str, position: int) -> dict[str, Path]:
    """Codes as they are written where `raised(…)` is made."""
    found: dict[str, Path] = {}
    for path, tree in trees():
        for called, call in calls(tree):
            if called == raised and len(call.args) > position:
                code = call.args[position]
                if isinstance(code, ast.Constant) and isinstance(code.value, str):
                    found[code.value] = path
    return found


def test_codes_that_are_made_are_those_that_are_begun() -> None:
    refused = literals_of("FrameRefused", 0)
    assert len(refused) > 7
    assert refused.keys() <= set(REFUSAL_CODES)
    assert {*PROOF_CODES, *JOIN_CODES} <= set(REFUSAL_CODES)
    steps = literals_of("StepRefused", 1)
    assert len(steps) == 4
    assert steps.keys() <= set(STEP_REFUSALS)
    rows = literals_of("RowError", 1)
    assert rows
    assert rows.keys() <= set(ROW_ERRORS)
    assert RowError.__doc__ is not None
    assert set(re.findall("`([a-z]+_[a-z_]+)`", RowError.__doc__)) == set(ROW_ERRORS), "what docs/protocol.md says"


def test_begin_counts_nothing_and_forgets_nothing() -> None:
    metrics = Metrics()
    metrics.count("mesh_a_total", 3.0, why="x")
    metrics.begin("mesh_a_total", "mesh_b_total", why=("x", "y"))
    metrics.begin("mesh_c_total")
    assert metrics.snapshot().counters == {
        'mesh_a_total{why="x"}': 3.0, 'mesh_a_total{why="y"}': 0.0,
        'mesh_b_total{why="x"}': 0.0, 'mesh_b_total{why="y"}': 0.0, "mesh_c_total": 0.0,
    }  # fmt: skip
