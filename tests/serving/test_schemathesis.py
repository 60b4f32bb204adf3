"""schemathesis against a mesh, by its own document: no 5xx, no invalid body accepted, every answer as documented.

In a virtual environment of its own: no test but this one needs it. That valid bodies are accepted is not asked of it,
since the document says neither rules between fields nor limits of the model; that it allows whatever is served,
`tests/nodes/gateway/test_schemas.py` shows.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.held import assert_nothing_held

pytestmark = [pytest.mark.process, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(3000)]

PACKAGE = "schemathesis>=4.32,<5"


@pytest.fixture(scope="module")
def schemathesis(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command, installed."""
    folder = tmp_path_factory.mktemp("schemathesis")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", PACKAGE]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=1200, check=False)
    if installed.returncode:
        pytest.skip(f"schemathesis cannot be installed here: {installed.stderr[-300:]}")
    return str(folder / "bin" / "schemathesis")


def test_a_mesh_is_as_its_document_says(mesh: Any, schemathesis: str, tmp_path: Path) -> None:
    document = json.loads(mesh.get("/openapi.json"))
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    command = [
        schemathesis, "run", "openapi.json", "--url", mesh.url, "--max-examples", "50", "--seed", "3",
        "--phases", "coverage,fuzzing", "--checks", "all", "--exclude-checks", "positive_data_acceptance",
        "--continue-on-failure", "--generation-database", "none", "--suppress-health-check", "all",
        # A thousand tokens of a grammar, on a machine that others keep busy.
        "--request-timeout", "60", "--max-response-time", "60",
    ]  # fmt: skip
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert f"Tested: {sum(map(len, document['paths'].values()))}" in ran.stdout
    assert_nothing_held(mesh)
    assert "Traceback" not in mesh.logs()
