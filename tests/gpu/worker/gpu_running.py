"""Builds runners over pools in a CUDA device's memory, which torch allocates here and runners see by its address."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from nodes.model_spec import resolve_model
from nodes.models.pooling import Pooling
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.load import build_runner
from nodes.worker.ops.torch.attention import DeviceAttention
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.device_view import view_device_pages
from nodes.worker.pool.view import PoolView

# Libraries that are there only beside a GPU warn when they are imported.
GPU = [pytest.mark.filterwarnings("default")]
NEEDS_FLASHINFER = pytest.mark.skipif(not importlib.util.find_spec("flashinfer"), reason="needs flashinfer")
# The first test that uses a kernel may wait minutes for nvcc.
SLOW = pytest.mark.timeout(600)
BACKENDS = ["torch", pytest.param("flashinfer", marks=[NEEDS_FLASHINFER, SLOW])]


class Pages:
    """A pool's pages as `DevicePages`, every bit of them set: NaN in bfloat16 and float32."""

    def __init__(self, num_bytes: int, device: str = "cuda:0") -> None:
        self.memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device)
        self.pointer, self.num_bytes, self.device = self.memory.data_ptr(), num_bytes, self.memory.device.index


class Built(NamedTuple):
    """A runner and what it runs on; keeps the pool's memory."""

    runner: DeviceRunner
    network: DeviceNetwork
    attention: DeviceAttention
    view: PoolView
    pages: Pages


def build(
    model: str | Path,
    attention: str,
    *,
    dtype: str = "bfloat16",
    graphs: bool = False,
    deterministic: bool = False,
    num_pages: int = 200,
    max_batch_tokens: int = 512,
    group: Collectives | None = None,
    device: str = "cuda:0",
    pooling: Pooling | None = None,
) -> Built:
    """`group`: the runner is of that rank of it. `pooling`: of a model that makes vectors."""
    spec = resolve_model(str(model))
    spec = spec if pooling is None else msgspec.structs.replace(spec, pooling=pooling)
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    layout = spec.kv_layout(dtype, 16, rank, size)
    pages = Pages(num_pages * layout.page_bytes, device)
    view = PoolView(pages.memory, layout) if device == "cpu" else view_device_pages(pages, layout)
    config = WorkerConfig(
        group="g", model=str(model), agent="a", dtype=dtype, device=device, attention=attention, cuda_graphs=graphs,
        deterministic=deterministic, max_batch_tokens=max_batch_tokens,
    )  # fmt: skip
    return Built(*build_runner(spec, config, view, group), view, pages)
