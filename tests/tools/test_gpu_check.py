"""The GPU check's own decisions, without a GPU: time, states, tables, what is killed, what the host has."""

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.figures import Figure, figures_in, of_limit, say
from tools.gpu_check import __main__ as command
from tools.gpu_check import host, report
from tools.gpu_check.plan import (
    FAILED,
    NOT_REACHED,
    OK,
    SKIPPED,
    STEPS,
    Outcome,
    Step,
    UnknownStep,
    choose,
    exit_code,
    state_of,
    time_for,
)

ROOT = Path(__file__).parents[2]


def test_every_step_runs_what_exists():
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        module = step.arguments[1]
        assert module == "pytest" or (ROOT / f"{module.replace('.', '/')}.py").exists()
        for argument in step.arguments:
            assert not argument.startswith("tests/") or (ROOT / argument).exists()


def test_steps_are_chosen_by_beginning():
    assert choose([]) == list(STEPS)
    assert [step.name for step in choose(["steps", "gaps"])] == ["steps-0.6b", "steps-8b", "gaps"]
    with pytest.raises(UnknownStep, match="no step 'gap-'; there are kernels, parity"):
        choose(["gap-"])


@given(st.floats(1, 600), st.lists(st.tuples(st.floats(1, 400), st.floats(0, 1)), max_size=30))
def test_the_whole_never_takes_longer_than_it_may(budget_s, steps):
    left_s = budget_s
    for limit_s, share in steps:
        limit = time_for(Step("x", (), limit_s), left_s)
        if limit is None:
            assert min(limit_s, left_s) < 5
            continue
        assert 5 <= limit <= min(limit_s, left_s)
        left_s -= share * limit
    assert left_s >= 0


@pytest.mark.parametrize(
    ("code", "output", "state", "detail"),
    [
        (0, "....\n12 passed in 3.20s\n", OK, "12 passed in 3.20s"),
        (0, "SKIPPED [5] x: no CUDA device here\n5 skipped in 4.92s\n", SKIPPED, "5 skipped in 4.92s"),
        (0, "SKIPPED [1] x: why\n3 passed, 1 skipped in 1.00s\n", OK, "3 passed, 1 skipped in 1.00s"),
        (0, "figure | a | 1 s\n", OK, ""),
        (0, "skipped: ImportError: no flash\n", SKIPPED, "ImportError: no flash"),
        (1, "FAILED tests/x.py::y - assert 1\n1 failed in 2s\n", FAILED, "exit 1: FAILED tests/x.py::y - assert 1"),
        (1, "Traceback\nValueError: no\n", FAILED, "exit 1: ValueError: no"),
        (4, "error: unrecognized\n", FAILED, "exit 4: error: unrecognized"),
        (-9, "", FAILED, "exit -9: "),
        (None, "loading\n\n", FAILED, "killed at its time limit; last line: loading"),
    ],
)
def test_states(code, output, state, detail):
    assert state_of(code, output) == (state, detail)


def test_only_what_all_ran_and_passed_is_a_success():
    assert exit_code([Outcome("a", OK), Outcome("b", OK)]) == 0
    assert exit_code([]) == 1
    for state in (FAILED, SKIPPED, NOT_REACHED):
        assert exit_code([Outcome("a", OK), Outcome("b", state)]) == 1


def test_figures_go_through_text_and_back(capsys):
    say("decode, batch 1", "231 tok/s", of_limit(231, 281, "reading", "tok/s"), "0.80")
    say("load", "3 s")
    text = f"loading\n{capsys.readouterr().out}figure | cut"
    assert figures_in(text) == [
        Figure("decode, batch 1", "231 tok/s", "0.82 of reading (281 tok/s)", "0.80"),
        Figure("load", "3 s"),
    ]


def test_the_table_and_the_json_say_the_same():
    outcomes = [Outcome("parity", OK, 12.4, "3 passed"), Outcome("gaps", NOT_REACHED)]
    figures = {"parity": [], "steps": [Figure("decode", "10 tok/s", "0.5 of reading", "0.80")]}
    text = report.text({"torch": "2.11", "pyzmq": "missing"}, outcomes, figures, 300.4)
    lines = text.splitlines()
    assert "missing: pyzmq" in lines
    assert "parity  ok           12 s  3 passed" in lines
    assert "gaps    not reached  0 s" in lines
    assert "decode  10 tok/s  goal 0.80  0.5 of reading" in lines
    assert lines[-1] == "1 of 2 steps passed in 300 s"
    document = json.loads(json.dumps(report.document({"torch": "2.11"}, outcomes, figures, 300.4)))
    assert [step["state"] for step in document["steps"]] == [OK, NOT_REACHED]
    assert document["figures"] == [
        {"step": "steps", "name": "decode", "value": "10 tok/s", "beside": "0.5 of reading", "goal": "0.80"}
    ]


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path):
    """A mesh is in a session of its own: killing the group of the step would leave it on the device."""
    script = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    log = tmp_path / "log"
    assert host.run(["-c", script], tmp_path, {**os.environ, "GPU_CHECK_TEST": str(tmp_path)}, log, 2.0) is None
    assert time.monotonic() - start < 15
    assert log.read_text() == "begun\n"
    for _ in range(100):
        if not host.marked(f"GPU_CHECK_TEST={tmp_path}"):
            break
        time.sleep(0.05)
    assert not host.marked(f"GPU_CHECK_TEST={tmp_path}")
    assert host.run(["-c", "raise SystemExit(3)"], tmp_path, os.environ, log, 20.0) == 3


def test_the_host_is_asked_what_it_has(tmp_path, monkeypatch):
    home = tmp_path / "cuda"
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch(0o700)
    shim = tmp_path / "shim"
    shim.mkdir()
    (shim / "nvcc").symlink_to(home / "bin/nvcc")
    variables = host.environment(ROOT, tmp_path / "site", {"PATH": str(shim), "PYTHONPATH": "/x"})
    assert variables["CUDA_HOME"] == str(home)
    assert variables["PYTHONPATH"] == f"{ROOT}:{tmp_path / 'site'}:/x"
    monkeypatch.setenv("PATH", "/nowhere")
    found = host.versions(str(tmp_path))
    assert found["device"] == found["nvcc"] == "missing"
    assert found["msgspec"] != "missing"
    package = tmp_path / "flashinfer_python-0.6.13.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.13\n")
    assert host.versions(str(tmp_path))["flashinfer-python"] == "0.6.13"
    assert "no wheels" in host.install_wheels(tmp_path, tmp_path / "site")


def test_wheels_are_unpacked_once_and_at_the_same_place(tmp_path, monkeypatch):
    """FlashInfer compiles again what it finds compiled from other paths, or from newer files."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "something-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("something.py", "x = 1\n")
        wheel.writestr("something-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: something\nVersion: 1.0\n")
        wheel.writestr(
            "something-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("something-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    site = host.site_for(wheels)
    assert site == host.site_for(wheels)
    assert host.install_wheels(wheels, site) == ""
    before = (site / "something.py").stat().st_mtime_ns
    assert host.install_wheels(wheels, site) == ""
    assert (site / "something.py").stat().st_mtime_ns == before
    (wheels / "something-1.0-py3-none-any.whl").rename(wheels / "something-1.1-py3-none-any.whl")
    assert host.site_for(wheels) != site


def test_every_test_for_a_gpu_is_in_a_step():
    named = {argument for step in STEPS for argument in step.arguments}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").rglob("test_*.py")}
    assert there <= named


def test_pytest_runs_without_its_timeout_plugin():
    assert host.pytest_options(True) == ["-W", "default"], "the host's packages may warn"
    assert "--timeout" not in " ".join(host.pytest_options(False))


def checked(tmp_path, steps, minutes):
    ends_at = time.monotonic() + minutes * 60
    check = command.Check(steps, dict(os.environ), tmp_path, ends_at, True)
    check.run()
    return check


def test_steps_are_run_in_turn_and_their_figures_kept(tmp_path):
    steps = [
        Step("a", ("-c", "print('figure | speed | 1 m/s')"), 20.0),
        Step("b", ("-c", "raise SystemExit('no')"), 20.0),
        Step("c", ("-c", "import time; time.sleep(30)"), 5.0),
    ]
    check = checked(tmp_path, steps, 1.0)
    assert [one.state for one in check.outcomes] == [OK, FAILED, FAILED]
    assert check.figures["a"] == [Figure("speed", "1 m/s")]
    assert check.outcomes[1].detail == "exit 1: no"
    assert checked(tmp_path, steps[:1], 0.01).outcomes[0].state == NOT_REACHED


def test_it_needs_nothing_but_the_standard_library():
    words = [sys.executable, "-S", "-m", "tools.gpu_check", "--list", "--only", "roofline"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "roofline  not reached" in done.stdout
