"""The Grafana board and the Prometheus rules ask for figures that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OBSERVE = ROOT / "deploy" / "observe"
NAME = re.compile(r"\b(mesh_[a-z_]+|vllm:[a-z_]+)\b")
SOURCES = "\n".join(path.read_text() for folder in ("mesh", "nodes", "cli") for path in (ROOT / folder).rglob("*.py"))


def expressions() -> list[str]:
    board: dict[str, Any] = json.loads((OBSERVE / "kvmesh.grafana.json").read_text())
    of_board = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    of_rules = re.findall(r"^ +expr: (.+)$", (OBSERVE / "rules.yaml").read_text(), re.MULTILINE)
    assert len(of_board) > 20
    assert len(of_rules) > 5
    return of_board + of_rules


@pytest.mark.parametrize("expression", expressions())
def test_each_figure_that_is_asked_for_is_told_by_somebody(expression: str) -> None:
    names = {re.sub("_(bucket|count|sum)$", "", name) for name in NAME.findall(expression)}
    assert names, expression
    unknown = [
        name for name in names if f'"{name}"' not in SOURCES and f'"{name.removesuffix("_total")}"' not in SOURCES
    ]
    assert not unknown, unknown
    # A rate of what goes up and down says nothing, and a counter by itself little.
    for rated in re.findall(r"(?:rate|increase)\((mesh_[a-z_]+)", expression):
        assert rated.endswith(("_total", "_bucket")), rated


def test_panels_do_not_overlap() -> None:
    panels = json.loads((OBSERVE / "kvmesh.grafana.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_them() -> None:
    for words in (("check", "rules", "rules.yaml"), ("check", "config", "prometheus.yaml")):
        done = subprocess.run(["promtool", *words], cwd=OBSERVE, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
