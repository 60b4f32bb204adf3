"""A whole mesh on one GPU: prefill and decode in processes of their own over `cuda_ipc`, and the death of a worker."""

from collections.abc import Iterator

import pytest

from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import Answer, differences
from tests.process.device_mesh import APART, MIXED, answers_of, answers_when_struck, mesh_on, undisturbed_answers

# The first start on a host compiles kernels.
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def apart() -> Iterator[ChaosMesh]:
    with mesh_on("cuda:0", *APART) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(apart: ChaosMesh) -> list[Answer]:
    return undisturbed_answers(apart)


def test_prefill_and_decode_apart_give_the_text_of_one_process(apart: ChaosMesh, undisturbed: list[Answer]) -> None:
    with mesh_on("cuda:0", *MIXED) as mixed:
        assert not differences(answers_of(mixed, "mixed"), undisturbed)


@pytest.mark.parametrize("actor_id", ["worker-decode-0", "worker-prefill-0"])
def test_kill_9_of_a_worker_under_load_does_not_show_in_the_text(
    apart: ChaosMesh, undisturbed: list[Answer], actor_id: str
) -> None:
    """The next worker opens the same pages: what was computed is not computed again, but for the steps in flight."""
    before = apart.settled(120.0)
    answers = answers_when_struck(apart, undisturbed, actor_id)
    after = apart.settled(120.0)
    assert after.epochs[actor_id] == before.epochs[actor_id] + 1
    assert after.epochs["kv-agent-0"] == before.epochs["kv-agent-0"], "whoever owns the pages lives on"
    assert not differences(answers, undisturbed)


@pytest.mark.parametrize("actor_id", ["scheduler-decode-0", "kv-agent-0"])
def test_no_request_is_lost_where_kv_is_computed_again(
    apart: ChaosMesh, undisturbed: list[Answer], actor_id: str
) -> None:
    """After a scheduler's death a page of each request, after the agent's all pages, which die with it.

    What is computed again in chunks may differ in the last bit of bfloat16 from what was computed token by token, and
    so may what is drawn from it: lengths and counts are compared, and how many texts are equal is said.
    """
    before = apart.settled(120.0)
    answers = answers_when_struck(apart, undisturbed, actor_id)
    after = apart.settled(180.0)
    assert after.epochs[actor_id] > before.epochs[actor_id]
    assert [(one.finish_reason, one.usage) for one in answers] == [
        (one.finish_reason, one.usage) for one in undisturbed
    ]
    print(f"after {actor_id}: {len(differences(answers, undisturbed))} of {len(answers)} texts differ")
