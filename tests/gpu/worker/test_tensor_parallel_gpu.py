"""Ranks over NCCL: what one device can show, and two ranks where there are two, or where NCCL takes two on one."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_rank import computed
from gpu_running import GPU, SLOW, build
from safetensors.torch import load_file
from test_device_runner import text

from nodes.worker.cuda.graphs import GraphRecorder
from nodes.worker.cuda.nccl_collectives import NcclCollectives, NcclCollectivesMaker
from nodes.worker.errors import CollectiveFailed, GroupNotFormed

pytestmark = [*GPU, pytest.mark.skipif(not importlib.util.find_spec("cupy"), reason="needs cupy"), SLOW]
MODEL = "random:tiny-qwen2"
PROCESS = Path(__file__).parent / "gpu_rank.py"


def several_on_one() -> bool:
    """Whether NCCL was asked to take several ranks on a device, and can."""
    from cupy.cuda import nccl

    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl.get_version() >= 23_000


def second_device() -> str:
    if torch.cuda.device_count() > 1:
        return "cuda:1"
    if several_on_one():
        return "cuda:0"
    pytest.skip("needs two CUDA devices, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")


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


def start(what: str, unique_id: bytes, device: str, *files: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, str(PROCESS), what, unique_id.hex(), "1", "2", device, *files]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    device, file = second_device(), tmp_path / "second.safetensors"
    expected = computed(MODEL, None, "cuda:0")
    maker = NcclCollectivesMaker(120.0)
    unique_id = maker.unique_id()
    process = start("model", unique_id, device, str(file))
    try:
        group = maker.connect(unique_id, 0, 2, "cuda:0")
        first = computed(MODEL, group, "cuda:0")
        assert process.communicate(timeout=120)[0].splitlines()[-1] == "done"
        group.check()
        second = load_file(file)
    finally:
        process.kill()
        process.communicate()
    assert all(torch.equal(first[name], second[name]) for name in first), "ranks must draw the same tokens"
    assert torch.allclose(first["logits"], expected["logits"], atol=0.06, rtol=0.06)
    group.close()


def test_what_a_dead_rank_leaves_hanging_ends_by_an_abort() -> None:
    device = second_device()
    maker = NcclCollectivesMaker(120.0)
    unique_id = maker.unique_id()
    process = start("sums", unique_id, device)
    try:
        group = maker.connect(unique_id, 0, 2, "cuda:0")
        x, done = torch.ones(1 << 20, device="cuda:0"), torch.cuda.Event()
        for _ in range(20):
            group.all_reduce(x)
        torch.cuda.synchronize()
        process.kill()
        process.communicate()
        group.all_reduce(x)
        done.record()
        time.sleep(2.0)
        print(f"with the other rank dead the sum {'ended' if done.query() else 'hangs'}")
        begin = time.monotonic()
        group.abort()
        done.synchronize()
        print(f"aborting it took {time.monotonic() - begin:.2f} s")
        with pytest.raises(CollectiveFailed):
            group.check()
        assert float(torch.ones(10, device="cuda:0").sum()) == 10
    finally:
        process.kill()
        process.communicate()
