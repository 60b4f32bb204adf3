"""OLMo 2 agrees with transformers, on the CPU and by a device's operations, and is not cut for ranks."""

from pathlib import Path

import pytest
from test_parity import LINEAR, PLAIN, assert_agrees, save_model
from torch_running import make_runner

from nodes.model_spec import TensorParallelUnfit, resolve_model
from tests.nodes.worker.cuda.device_running import device_runner


@pytest.mark.parametrize(("heads", "rope", "tied"), [((4, 2), PLAIN, False), ((3, 3), LINEAR, True)])
def test_olmo2(tmp_path: Path, heads: tuple[int, int], rope: dict[str, object], tied: bool) -> None:
    reference = save_model(tmp_path, "olmo2", heads=heads, hidden=48, rope=rope, tied=tied)
    for runner in (make_runner(tmp_path), device_runner(tmp_path)):
        assert_agrees(runner, reference)
    with pytest.raises(TensorParallelUnfit, match=r"go over all heads\. Use a tensor-parallel size of 1\."):
        resolve_model(str(tmp_path)).shard(0, 3)
