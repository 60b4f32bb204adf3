"""A whole mesh with `--device cuda` on devices of software: spawned actors, pages that others open, deaths, releases.

In float32, where it does not show in a text whether a token's KV was computed in a chunk or alone.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.chaos_mesh import RECOMPUTED_MAX, ChaosMesh, recomputed_tokens
from tests.chaos.streams import Answer, differences
from tests.process.device_mesh import APART, COPY_TABLES, MIXED, answers_of, dies_unseen, mesh_on, undisturbed_answers
from tests.software_device.device import bytes_in_use, environment

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(300)]


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


@contextlib.contextmanager
def software_mesh(memory: Path, *options: str) -> Iterator[ChaosMesh]:
    """A mesh on a device whose memory is in `memory`, and proof that all of it is given back."""
    # What it has is only counted; the overheads that are planned for are a real device's.
    variables = environment(memory, num_bytes=16 << 30)
    with mesh_on("cuda:0", *options, dtype="float32", kv_memory="32MiB", environment=variables) as mesh:
        yield mesh
    assert bytes_in_use(memory) == 0


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def apart(device: Path) -> Iterator[ChaosMesh]:
    with software_mesh(device, *APART, "--memory-saver") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(apart: ChaosMesh) -> list[Answer]:
    return undisturbed_answers(apart)


@pytest.mark.slow
def test_prefill_and_decode_apart_give_the_text_of_one_process(
    apart: ChaosMesh, undisturbed: list[Answer], tmp_path: Path
) -> None:
    with software_mesh(tmp_path, *MIXED) as mixed:
        assert not differences(answers_of(mixed, "mixed"), undisturbed)


@pytest.mark.slow
def test_pools_are_freed_and_weights_are_backed_up(apart: ChaosMesh, undisturbed: list[Answer], device: Path) -> None:
    at = sum(answer.num_events for answer in undisturbed) // 3
    pids = {name: one["pid"] for name, one in apart.host.ps().items() if one["role"] == "worker"}
    ways: list[set[str]] = []
    answers = answers_of(apart, "released", at=at, blow=lambda: ways.append(released(apart, device)))
    assert not differences(answers, undisturbed)
    assert ways == [{"backup"}]
    assert saved(device) == ["pause", "pause", "resume", "resume"]
    assert released(apart, device, "--keep-weights") == {"keep"}
    assert released(apart, device, "--keep-kv") == {"backup"}
    assert len(saved(device)) == 8
    assert not differences(answers_of(apart, "afterwards"), undisturbed)
    assert {name: apart.host.ps()[name]["pid"] for name in pids} == pids, "workers lived through all of it"


# A scheduler dies in tests/chaos too, whatever its device is.
@pytest.mark.parametrize(
    "actor_id",
    [
        "worker-decode-0",
        pytest.param("worker-prefill-0", marks=pytest.mark.slow),
        pytest.param("scheduler-decode-0", marks=pytest.mark.slow),
    ],
)
def test_kill_9_under_load_does_not_show_in_the_text(
    apart: ChaosMesh, undisturbed: list[Answer], device: Path, actor_id: str
) -> None:
    """The next worker opens the same pages."""
    before, after = dies_unseen(apart, undisturbed, device, actor_id)
    assert after.epochs[actor_id] == before.epochs[actor_id] + 1
    assert after.epochs["kv-agent-0"] == before.epochs["kv-agent-0"], "whoever owns the pages lives on"
    assert recomputed_tokens(before, after)["scheduler-decode-0"] <= RECOMPUTED_MAX["decode worker"]


def test_the_death_of_the_agent_takes_the_pages_and_no_request(
    apart: ChaosMesh, undisturbed: list[Answer], device: Path
) -> None:
    """Its memory is free only when the workers have let go of it too; then pools are made again and mapped anew."""
    before, after = dies_unseen(apart, undisturbed, device, "kv-agent-0")
    assert after.epochs["kv-agent-0"] > before.epochs["kv-agent-0"]


@pytest.mark.slow
def test_without_a_memory_saver_weights_are_dropped_if_that_is_said(tmp_path: Path) -> None:
    with software_mesh(tmp_path, *APART) as mesh:
        undisturbed = answers_of(mesh, "undisturbed")
        assert released(mesh, tmp_path, "--reload-weights") == {"reload"}
        assert not differences(answers_of(mesh, "afterwards"), undisturbed)
        assert saved(tmp_path) == []
