"""Request after request: no process grows, in memory or in descriptors."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.held import assert_nothing_held
from tests.serving.test_slow_readers import resident_bytes

pytestmark = pytest.mark.process

MESH = (
    "--model", "echo", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0", "--kv-pages", "64",
    "--context-length", "1008",
)  # fmt: skip
MAX_MORE_DESCRIPTORS = 4


def serve(mesh: Any, first: int, last: int) -> None:
    def one(number: int) -> None:
        text = f"request {number} is not like the one before it"
        status, answer = mesh.post("/v1/completions", {"prompt": text, "max_tokens": 100})
        assert (status, answer["choices"][0]["text"]) == (200, text)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(first, last)))
    assert_nothing_held(mesh)


def sizes(mesh: Any) -> dict[str, tuple[int, int]]:
    """Resident bytes and open descriptors of every process."""
    return {
        actor["actor_id"]: (resident_bytes(actor["pid"]), len(os.listdir(Path("/proc") / str(actor["pid"]) / "fd")))
        for actor in mesh.ps()
    }


@pytest.mark.parametrize(("num_warm", "num_requests"), [(80, 160), pytest.param(500, 2000, marks=pytest.mark.slow)])
def test_requests_leave_no_trace(mesh_of: Any, num_warm: int, num_requests: int) -> None:
    mesh = mesh_of(*MESH)
    serve(mesh, 0, num_warm)
    before = sizes(mesh)
    serve(mesh, num_warm, num_requests)
    after = sizes(mesh)
    assert before.keys() == after.keys()
    for actor_id, (num_bytes, num_open) in after.items():
        assert num_bytes - before[actor_id][0] < 4 << 20, (actor_id, before, after)
        assert num_open <= before[actor_id][1] + MAX_MORE_DESCRIPTORS, (actor_id, before, after)
