"""Ranks over NCCL: what one device can show, and two ranks where there are two, or where NCCL takes two on one."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nodes.worker.cuda.graphs import GraphRecorder
from nodes.worker.cuda.nccl_collectives import NcclCollectives, NcclCollectivesMaker
from nodes.worker.errors import GroupNotFormed
from tests.gpu.worker.gpu_rank import MODEL, computed
from tests.gpu.worker.gpu_running import GPU, SLOW, build
from tests.nodes.worker.cuda.test_device_runner import text

pytestmark = [*GPU, pytest.mark.skipif(not importlib.util.find_spec("cupy"), reason="needs cupy"), SLOW]
PROCESS = Path(__file__).parent / "gpu_rank.py"
LIBRARY = os.environ.get("KVMESH_NCCL_LIBRARY", "")
"""An NCCL from version 2.30 on that takes several ranks on a device, with AllReduce and AllGather by ring."""


def second_device() -> tuple[str, dict[str, str]]:
    """The device of rank 1, and what both ranks need in their environment."""
    if torch.cuda.device_count() > 1:
        return "cuda:1", {}
    if not LIBRARY:
        pytest.skip("needs two CUDA devices, or KVMESH_NCCL_LIBRARY: an NCCL that takes two ranks on one")
    several = {"LD_PRELOAD": LIBRARY, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_ALGO": "Ring", "NCCL_MAX_CTAS": "8"}
    return "cuda:0", several


@pytest.fixture
def alone() -> Iterator[NcclCollectives]:
    """A group of one rank."""
    maker = NcclCollectivesMaker(60.0)
    group = maker.connect(maker.unique_id(), 0, 1, "cuda:0")
    yield group
    group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_run_on_the_current_stream(alone: NcclCollectives, dtype: torch.dtype) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Long enough that an operation on another stream would be done before.
        torch.cuda._sleep(50_000_000)
        x = torch.arange(1000, device="cuda", dtype=torch.float32).to(dtype).view(10, 100)
        total, parts = alone.all_reduce(x.clone()), alone.all_gather(x)
    stream.synchronize()
    assert torch.equal(total, x)
    assert torch.equal(parts, x)
    alone.check()


def test_operations_are_captured_and_replayed(alone: NcclCollectives) -> None:
    x = torch.zeros(8, 64, device="cuda", dtype=torch.bfloat16)
    result, replay = GraphRecorder(torch.device("cuda:0")).record(lambda: alone.all_gather(alone.all_reduce(x + 1)))
    for number in (1.0, 2.0, 3.0):
        x.fill_(number)
        replay()
        assert torch.equal(result, torch.full_like(result, number + 1))
        # Between replays, outside of the graph, on the same communicator.
        assert torch.equal(alone.all_reduce(x.clone()), x)
    alone.check()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_group_of_one_computes_what_a_worker_without_one_does(
    alone: NcclCollectives, graphs: bool, deterministic: bool
) -> None:
    expected = text(build(MODEL, "auto", graphs=graphs, deterministic=deterministic).runner, 3, 12)
    runner = build(MODEL, "auto", graphs=graphs, deterministic=deterministic, group=alone).runner
    assert text(runner, 3, 12) == expected


def test_a_rank_that_stays_alone_gives_up_and_the_device_lives_on() -> None:
    maker = NcclCollectivesMaker(2.0)
    begin = time.monotonic()
    with pytest.raises(GroupNotFormed):
        maker.connect(maker.unique_id(), 0, 2, "cuda:0")
    assert time.monotonic() - begin < 30
    assert float(torch.ones(10, device="cuda").sum()) == 10


@contextlib.contextmanager
def two_ranks(*of: tuple[str, ...]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Two processes of `gpu_rank.py`, each with what it is to do and a file, that know of each other."""
    device, variables = second_device()
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), what, str(rank), "2", on, *files],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for rank, (on, (what, *files)) in enumerate(zip(("cuda:0", device), of, strict=True))
    ]  # fmt: skip
    try:
        processes[1].stdin.write(processes[0].stdout.readline())
        processes[1].stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{rank}.safetensors") for rank in (0, 1)]
    with two_ranks(("model", files[0]), ("model", files[1])) as processes:
        for process in processes:
            assert process.communicate(timeout=300)[0].splitlines()[-1] == "done"
    first, second = map(load_file, files)
    assert all(torch.equal(first[name], second[name]) for name in first), "ranks must draw the same tokens"
    assert torch.allclose(first["logits"], computed(None, "cuda:0")["logits"], atol=0.06, rtol=0.06)


def test_what_a_dead_rank_leaves_hanging_ends_by_an_abort() -> None:
    with two_ranks(("lose",), ("sums",)) as (survivor, victim):
        assert survivor.stdout.readline() == "running\n"
        victim.kill()
        victim.wait()
        survivor.stdin.write("\n")
        survivor.stdin.flush()
        found = survivor.stdout.readline()
        print(found)
        assert "aborted in" in found
