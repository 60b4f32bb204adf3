"""A whole mesh of tensor-parallel groups over two GPUs: ranks connected by NCCL, and the death of one under load."""

from collections.abc import Iterator

import pytest
import torch

from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import Answer, differences
from tests.process.device_mesh import APART, answers_of, mesh_on, pages_moved

# The first start on a host compiles kernels.
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ChaosMesh]:
    with mesh_on("cuda:0,cuda:1", *APART, "--tp", "2") as mesh:
        yield mesh


def test_the_death_of_a_rank_loses_no_request(ranks: ChaosMesh) -> None:
    undisturbed: list[Answer] = answers_of(ranks, "undisturbed")
    assert pages_moved(ranks) > len(undisturbed), "pages did move, on both devices"
    before = ranks.settled(120.0)
    at = sum(answer.num_events for answer in undisturbed) // 3
    answers = answers_of(ranks, "struck", at=at, blow=lambda: ranks.strike("worker-decode-0.1"))
    after = ranks.settled(180.0)
    restarted = {actor_id for actor_id, epoch in after.epochs.items() if epoch > before.epochs[actor_id]}
    assert restarted == {"worker-decode-0", "worker-decode-0.1"}, "its group, and nobody else"
    assert not differences(answers, undisturbed)
