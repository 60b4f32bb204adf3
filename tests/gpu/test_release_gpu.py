"""A mesh on a GPU gives its device memory back while it lives: the driver counts it as free, and texts stay."""

import importlib.util
import json
import os
from typing import Any

import pytest

from cli.supervisor.device_memory import ask_device
from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import differences
from tests.process.device_mesh import MIXED, answers_of, mesh_on

# The first start on a host compiles kernels.
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
NEEDS_SAVER = pytest.mark.skipif(not importlib.util.find_spec("torch_memory_saver"), reason="needs torch-memory-saver")
POOL_BYTES = 128 << 20
"""What `mesh_on` gives a pool, if nothing else is said."""


def memory(mesh: ChaosMesh, *arguments: str) -> dict[str, Any]:
    result = mesh.host.meshctl(*arguments, "-o", "json", timeout_s=300)
    assert result.returncode == 0, result.stderr
    (group,) = json.loads(result.stdout)
    return group


@pytest.mark.parametrize(
    ("started", "released", "weights"),
    [
        pytest.param(("--memory-saver",), (), "backup", marks=NEEDS_SAVER),
        ((), ("--reload-weights",), "reload"),
        ((), ("--keep-weights",), "keep"),
    ],
)
def test_the_driver_has_the_memory_meanwhile_and_the_text_is_the_same(
    started: tuple[str, ...], released: tuple[str, ...], weights: str
) -> None:
    with mesh_on("cuda:0", *MIXED, *started) as mesh:
        undisturbed = answers_of(mesh, "undisturbed")
        worker = mesh.host.ps()["worker-mixed-0"]
        held = ask_device(0, os.environ).free_bytes
        found = memory(mesh, "release", *released)
        assert (found["state"], found["weights"]) == ("released", weights)
        free = ask_device(0, os.environ).free_bytes
        print(f"{weights}: {(free - held) / (1 << 20):.0f} MiB more are free")
        # Workspaces, graphs and activations go too.
        assert free - held >= POOL_BYTES
        assert memory(mesh, "resume")["state"] == "held"
        assert not differences(answers_of(mesh, "undisturbed"), undisturbed)
        assert mesh.host.ps()["worker-mixed-0"]["pid"] == worker["pid"], "it was done in place"
        assert ask_device(0, os.environ).free_bytes >= held - (64 << 20)
