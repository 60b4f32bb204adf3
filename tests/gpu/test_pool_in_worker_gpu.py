"""A mesh on a GPU whose workers make their pools: pages are opened by the agent, and die with their worker."""

import pytest

from tests.chaos.streams import differences
from tests.process.device_mesh import APART, answers_of, mesh_on, pages_moved

# The first start on a host compiles kernels.
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_pages_of_workers_are_copied_and_a_death_of_one_loses_no_request() -> None:
    with mesh_on("cuda:0", *APART, "--pool-in-worker") as mesh:
        undisturbed = answers_of(mesh, "undisturbed")
        assert pages_moved(mesh) > len(undisturbed)
        assert not differences(answers_of(mesh, "undisturbed"), undisturbed)
        before = mesh.settled(120.0)
        at = sum(answer.num_events for answer in undisturbed) // 3
        answers = answers_of(mesh, "struck", at=at, blow=lambda: mesh.strike("worker-decode-0"))
        after = mesh.settled(120.0)
        assert after.epochs["scheduler-decode-0"] > before.epochs["scheduler-decode-0"], "its cache went with the pages"
        # What is computed again is computed in other batches: in bfloat16 texts may differ, and lengths may not.
        assert [(one.finish_reason, one.usage) for one in answers] == [
            (one.finish_reason, one.usage) for one in undisturbed
        ]
