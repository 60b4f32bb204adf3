"""`meshctl up` where files have the names of modules, and what it says of a process that cannot start."""

import sys
from pathlib import Path

import pytest

from cli.exit_codes import ExitCode

pytestmark = pytest.mark.process

MODULES = ("mesh", "nodes", "cli", "kvstore", "random", "json", "typing", "transformers", "torch")
# As the installed command: what it imports is on its path, and the working directory is not.
PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from cli.main import main; main()"
MESHCTL = (sys.executable, "-P", "-c", PROGRAM)


@pytest.mark.parametrize(("model", "fork"), [("echo", "true"), pytest.param("tiny", "false", marks=pytest.mark.slow)])
def test_files_of_the_working_directory_are_not_imported(host, tmp_path, monkeypatch, model, fork):
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working directory was imported')")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(host, "command", lambda *words: [*MESHCTL, *words, "--name", host.name])
        mesh = host.up("--model", model, "--mixed", "1", wait=False, KVMESH_SUPERVISION__FORK=fork)
    host.wait_ready(mesh)
    answer = host.say("What is 37 + 45?", model=model, temperature=0)
    assert ("82" if model == "tiny" else "What is 37 + 45?") in answer
    host.ends_well(mesh)
    assert not list(tmp_path.glob("__pycache__"))


@pytest.mark.parametrize(
    ("fork", "told"),
    [("true", "the zygote ended: exit 1, see "), pytest.param("false", "gateway-0: exit 1", marks=pytest.mark.slow)],
)
def test_the_last_lines_of_who_cannot_start_are_in_the_error(host, fork, told):
    # Only actors import it.
    (host.base / "httptools.py").write_text("raise ImportError('damaged in transit')")
    failed = host.meshctl(
        "up", "--model", "echo", "--port", str(host.port), PYTHONPATH=str(host.base), KVMESH_SUPERVISION__FORK=fork
    )
    assert failed.returncode == ExitCode.NOT_READY, failed.stderr
    why = next(line for line in failed.stderr.splitlines() if line.strip().startswith("why:"))
    assert told in why
    assert "(last lines: " in why
    assert "ImportError: damaged in transit" in why
    host.assert_nothing_left()
