"""A mesh with `--device cuda` on devices of software gives its device memory back, and has it again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import Answer, differences
from tests.process.device_mesh import APART, answers_of
from tests.process.test_software_device import software_mesh
from tests.software_device.device import bytes_in_use

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(300)]

COPY_TABLES = 1 << 20
"""At most what the kv_agent keeps on a device to copy scattered pages with."""


def memory(mesh: ChaosMesh, *arguments: str) -> dict[str, Any]:
    """What `meshctl` says of each group."""
    result = mesh.host.meshctl(*arguments, "-o", "json")
    assert result.returncode == 0, result.stderr
    return {one["group"]: one for one in json.loads(result.stdout)}


def saved(directory: Path) -> list[str]:
    """What was paused and resumed, by one process after the other."""
    log = directory / "saver.log"
    return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []


def released(mesh: ChaosMesh, directory: Path, *options: str) -> set[str]:
    """Release everything, see that it is, and resume it; how weights went."""
    in_use = bytes_in_use(directory)
    found = memory(mesh, "release", *options)
    assert {one["state"] for one in found.values()} == {"released"}
    left = bytes_in_use(directory)
    assert left == in_use if "--keep-kv" in options else left <= COPY_TABLES, "what the agent copies with stays"
    assert {one["state"] for one in memory(mesh, "resume").values()} == {"held"}
    assert bytes_in_use(directory) == in_use
    return {one["weights"] for one in found.values()}


def test_pools_are_freed_and_weights_are_backed_up(tmp_path: Path) -> None:
    with software_mesh(tmp_path, *APART, "--memory-saver") as mesh:
        undisturbed = answers_of(mesh, "undisturbed")
        at = sum(answer.num_events for answer in undisturbed) // 3
        pids = {name: one["pid"] for name, one in mesh.host.ps().items() if one["role"] == "worker"}
        ways: list[set[str]] = []
        answers: list[Answer] = answers_of(mesh, "released", at=at, blow=lambda: ways.append(released(mesh, tmp_path)))
        assert not differences(answers, undisturbed)
        assert ways == [{"backup"}]
        assert saved(tmp_path) == ["pause", "pause", "resume", "resume"]
        assert released(mesh, tmp_path, "--keep-weights") == {"keep"}
        assert released(mesh, tmp_path, "--keep-kv") == {"backup"}
        assert len(saved(tmp_path)) == 8
        assert not differences(answers_of(mesh, "afterwards"), undisturbed)
        assert {name: mesh.host.ps()[name]["pid"] for name in pids} == pids, "workers lived through all of it"


@pytest.mark.slow
def test_without_a_memory_saver_weights_are_dropped_if_that_is_said(tmp_path: Path) -> None:
    with software_mesh(tmp_path, *APART) as mesh:
        undisturbed = answers_of(mesh, "undisturbed")
        assert released(mesh, tmp_path, "--reload-weights") == {"reload"}
        assert not differences(answers_of(mesh, "afterwards"), undisturbed)
        assert saved(tmp_path) == []
