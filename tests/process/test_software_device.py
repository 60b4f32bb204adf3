"""A whole mesh with `--device cuda` on devices of software: spawned actors, pages that others open, deaths.

In float32, where it does not show in a text whether a token's KV was computed in a chunk or alone.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_mesh import RECOMPUTED_MAX, ChaosMesh, recomputed_tokens
from tests.chaos.streams import Answer, differences
from tests.process.device_mesh import APART, MIXED, answers_of, dies_unseen, mesh_on, pages_moved
from tests.software_device.device import bytes_in_use, environment

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(300)]


@contextlib.contextmanager
def software_mesh(memory: Path, *options: str) -> Iterator[ChaosMesh]:
    """A mesh on a device whose memory is in `memory`, and proof that all of it is given back."""
    # What it has is only counted; the overheads that are planned for are a real device's.
    variables = environment(memory, num_bytes=16 << 30)
    with mesh_on("cuda:0", *options, dtype="float32", kv_memory="32MiB", environment=variables) as mesh:
        yield mesh
    assert bytes_in_use(memory) == 0


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def apart(memory: Path) -> Iterator[ChaosMesh]:
    with software_mesh(memory, *APART) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(apart: ChaosMesh) -> list[Answer]:
    answers = answers_of(apart, "undisturbed")
    assert len({answer.text for answer in answers}) > len(answers) // 2, "texts that are all alike prove nothing"
    return answers


def test_prefill_and_decode_apart_give_the_text_of_one_process(
    apart: ChaosMesh, undisturbed: list[Answer], tmp_path: Path
) -> None:
    assert pages_moved(apart) > len(undisturbed), "pages did move"
    with software_mesh(tmp_path, *MIXED) as mixed:
        assert not differences(answers_of(mixed, "mixed"), undisturbed)


# A worker that prefills dies in test_pool_in_worker.py too, and a scheduler in tests/chaos, whatever its device is.
@pytest.mark.parametrize(
    "actor_id",
    [
        "worker-decode-0",
        pytest.param("worker-prefill-0", marks=pytest.mark.slow),
        pytest.param("scheduler-decode-0", marks=pytest.mark.slow),
    ],
)
def test_kill_9_under_load_does_not_show_in_the_text(
    apart: ChaosMesh, undisturbed: list[Answer], memory: Path, actor_id: str
) -> None:
    """The next worker opens the same pages."""
    before, after = dies_unseen(apart, undisturbed, memory, actor_id)
    assert after.epochs[actor_id] == before.epochs[actor_id] + 1
    assert after.epochs["kv-agent-0"] == before.epochs["kv-agent-0"], "whoever owns the pages lives on"
    assert recomputed_tokens(before, after)["scheduler-decode-0"] <= RECOMPUTED_MAX["decode worker"]


def test_the_death_of_the_agent_takes_the_pages_and_no_request(
    apart: ChaosMesh, undisturbed: list[Answer], memory: Path
) -> None:
    """Its memory is free only when the workers have let go of it too; then pools are made again and mapped anew."""
    before, after = dies_unseen(apart, undisturbed, memory, "kv-agent-0")
    assert after.epochs["kv-agent-0"] > before.epochs["kv-agent-0"]
