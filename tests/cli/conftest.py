"""A mesh's directory of each test's own."""

from pathlib import Path

import pytest

from cli.supervisor.mesh_directory import MeshDirectory


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeshDirectory:
    """That of the mesh `m`, which is there and has nothing in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = MeshDirectory("m")
    directory.create()
    return directory
