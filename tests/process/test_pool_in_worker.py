"""Workers that make their pools themselves, on devices of software: who has device memory, and what a death costs."""

from pathlib import Path

import pytest

from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import differences
from tests.process.device_mesh import APART, COPY_TABLES, MIXED, answers_of, pages_moved
from tests.process.test_software_device import memory, software_mesh
from tests.software_device.device import bytes_in_use

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(300)]


def users(mesh: ChaosMesh, directory: Path) -> set[str]:
    """Actors that map memory of the device: each of them has a context on a real one."""
    return {
        name
        for name, one in mesh.host.ps().items()
        if one["pid"] and f"{directory}/0-" in Path(f"/proc/{one['pid']}/maps").read_text()
    }


@pytest.mark.slow
def test_the_agent_has_nothing_on_the_device_until_pages_are_copied(tmp_path: Path) -> None:
    with software_mesh(tmp_path, *MIXED) as mesh:
        undisturbed = answers_of(mesh, "undisturbed")
        assert users(mesh, tmp_path) == {"kv-agent-0", "worker-mixed-0"}
    with software_mesh(tmp_path, *MIXED, "--pool-in-worker") as mesh:
        assert not differences(answers_of(mesh, "undisturbed"), undisturbed)
        assert users(mesh, tmp_path) == {"worker-mixed-0"}


def test_prefill_and_decode_apart_copy_between_pages_of_workers(tmp_path: Path) -> None:
    with software_mesh(tmp_path, *APART, "--pool-in-worker") as mesh:
        undisturbed = answers_of(mesh, "undisturbed")
        assert pages_moved(mesh) > len(undisturbed)
        assert users(mesh, tmp_path) == {"kv-agent-0", "worker-prefill-0", "worker-decode-0"}
        before, in_use = mesh.settled(), bytes_in_use(tmp_path)
        at = sum(answer.num_events for answer in undisturbed) // 3
        for actor_id in ("worker-decode-0", "worker-prefill-0", "kv-agent-0"):
            answers = answers_of(mesh, "undisturbed", at=at, blow=lambda dies=actor_id: mesh.strike(dies))
            after = mesh.settled(60.0)
            assert after.epochs[actor_id] == before.epochs[actor_id] + 1
            assert not differences(answers, undisturbed), actor_id
            assert abs(bytes_in_use(tmp_path) - in_use) <= COPY_TABLES, (
                "what died with a worker was not kept by who had opened it"
            )
        # A worker's death cost its scheduler what it knew of its pages.
        assert after.epochs["scheduler-decode-0"] > before.epochs["scheduler-decode-0"]
        # Without a memory saver; no mesh of its own for that, since starting one costs more than all of this.
        refused = mesh.host.meshctl("release")
        assert (refused.returncode, "--reload-weights" in refused.stderr) == (1, True), refused.stderr
        assert {one["state"] for one in memory(mesh, "memory").values()} == {"held"}
        found = memory(mesh, "release", "--reload-weights")
        assert {one["state"] for one in found.values()} == {"released"}
        assert bytes_in_use(tmp_path) <= COPY_TABLES
        assert {one["state"] for one in memory(mesh, "resume").values()} == {"held"}
        assert not differences(answers_of(mesh, "undisturbed"), undisturbed)
