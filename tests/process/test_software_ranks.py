"""Groups of two tensor-parallel ranks on two devices of software, with its NCCL between them, struck under load."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import Answer
from tests.process.device_mesh import APART, dies_unseen, mesh_on, undisturbed_answers
from tests.software_device.device import bytes_in_use, environment

# CI has ranks on the CPU (`test_ranks.py`), one such device (`test_software_device.py`) and both with fakes.
pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("devices")


@pytest.fixture(scope="module")
def ranks(memory: Path) -> Iterator[ChaosMesh]:
    """All devices that are visible: a prefill and a decode rank on each."""
    variables = environment(memory, num_devices=2, num_bytes=16 << 30)
    with mesh_on("cuda", *APART, "--tp", "2", dtype="float32", kv_memory="32MiB", environment=variables) as mesh:
        yield mesh
    assert bytes_in_use(memory) == 0


@pytest.fixture(scope="module")
def undisturbed(ranks: ChaosMesh) -> list[Answer]:
    return undisturbed_answers(ranks)


@pytest.mark.parametrize("victim", ["worker-decode-0.1", "worker-decode-0", "scheduler-decode-0"])
def test_kill_9_under_load_does_not_show_in_the_text(
    ranks: ChaosMesh, undisturbed: list[Answer], memory: Path, victim: str
) -> None:
    """The next ranks open the same pages, on both devices."""
    before, after = dies_unseen(ranks, undisturbed, memory, victim)
    if victim.startswith("worker"):
        restarted = {actor_id for actor_id, epoch in after.epochs.items() if epoch > before.epochs[actor_id]}
        assert restarted == {"worker-decode-0", "worker-decode-0.1"}, "its group, and nobody else"


def test_the_death_of_the_agent_takes_the_pages_of_all_ranks_and_no_request(
    ranks: ChaosMesh, undisturbed: list[Answer], memory: Path
) -> None:
    before, after = dies_unseen(ranks, undisturbed, memory, "kv-agent-0")
    assert after.epochs["kv-agent-0"] > before.epochs["kv-agent-0"]
