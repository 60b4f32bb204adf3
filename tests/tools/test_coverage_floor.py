"""The floor itself: that it names files that exist, and that nothing below it goes through."""

import json
from pathlib import Path

import pytest

from tools.coverage_floor import CORES, Reached, main, read_report, shortfalls

ROOT = Path(__file__).parents[2]
PATHS = [path for paths in CORES.values() for path in paths]
ALL_REACHED = dict.fromkeys(PATHS, Reached(100.0, ""))


def entry(statements, covered, branches, covered_branches, missing_lines=(), missing_branches=()):
    return {
        "summary": {
            "num_statements": statements,
            "covered_lines": covered,
            "num_branches": branches,
            "covered_branches": covered_branches,
        },
        "missing_lines": list(missing_lines),
        "missing_branches": [list(one) for one in missing_branches],
    }


def test_every_core_is_named_once_and_exists():
    assert len(set(PATHS)) == len(PATHS)
    assert [path for path in PATHS if not (ROOT / path).is_file()] == []


def test_every_role_core_is_held():
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nodes").glob("**/core.py")}
    assert found - set(PATHS) == set()


def test_one_branch_of_many_is_not_everything():
    reached = read_report({"files": {"x.py": entry(5000, 5000, 5000, 4999, (), [(7, -1)])}})["x.py"]
    assert reached == Reached(99.9, "7->exit")
    assert read_report({"files": {"empty.py": entry(0, 0, 0, 0)}})["empty.py"].percent == 100.0


def test_a_core_takes_every_branch():
    assert shortfalls(ALL_REACHED) == []
    (line,) = shortfalls(ALL_REACHED | {"mesh/calls/table.py": Reached(99.9, "7->9")})
    assert line == "mesh/calls/table.py: 99.9 % of 100 % (calls); not reached: 7->9"


def test_a_core_that_is_not_measured_falls_short():
    (line,) = shortfalls({path: reached for path, reached in ALL_REACHED.items() if path != "mesh/calls/table.py"})
    assert line.startswith("mesh/calls/table.py: a core (calls) that is not in the report")


@pytest.mark.parametrize(
    ("path", "percent", "is_short"),
    [
        ("mesh/link/links.py", 94.9, True),
        ("nodes/a/b.py", 95.0, False),
        ("cli/commands/up.py", 0.0, False),
        ("nodes/worker/ops/torch/runner.py", 90.0, False),
        ("nodes/worker/ops/torch/runner.py", 89.9, True),
        ("nodes/worker/cuda/graphs.py", 0.0, False),
    ],
)
def test_the_rest_of_the_packages(path, percent, is_short):
    assert bool(shortfalls(ALL_REACHED | {path: Reached(percent, "1")})) == is_short


def test_the_exit_code_says_it(tmp_path, capsys):
    report = tmp_path / "report.json"
    whole = {path: entry(10, 10, 2, 2) for path in PATHS}
    report.write_text(json.dumps({"files": whole}))
    assert main(report) == 0
    report.write_text(json.dumps({"files": whole | {"mesh/run.py": entry(10, 5, 0, 0, [3, 4])}}))
    assert main(report) == 1
    assert "mesh/run.py: 50 % of 95 %; not reached: 3, 4\n1 modules fall short" in capsys.readouterr().out
