"""A mesh's directory of each test's own, and processes that are none of its mesh's."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.supervisor.kept.mesh_directory import MeshDirectory
from tests.cli.machines import Machine


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeshDirectory:
    """That of the mesh `m`, which is there and has nothing in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = MeshDirectory("m")
    directory.create()
    return directory


@pytest.fixture
def start_stranger() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that do nothing, and are killed in the end."""
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def stranger(start_stranger: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """A process that is no business of ours."""
    return start_stranger()


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine with the registry, where no environment variable says anything about a mesh."""
    for name in [name for name in os.environ if name.startswith("KVMESH_")]:
        monkeypatch.delenv(name)
    return Machine(tmp_path / "head-home", monkeypatch)


@pytest.fixture
def d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: Machine) -> Machine:
    """Another one."""
    return Machine(tmp_path / "d-home", monkeypatch)
