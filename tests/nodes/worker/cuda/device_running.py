"""Builds the device's runner over a pool in the host's memory, with graphs that run their work again."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import resolve_model
from nodes.models.pooling import Pooling
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.buckets import Buckets
from nodes.worker.cuda.graphs import DecodeGraphs
from nodes.worker.cuda.load import build_runner
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.kernels import TorchKernels
from nodes.worker.ops.torch.kinds import kinds_of
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.weights.loader import SafetensorsWeights
from nodes.worker.weights.random_weights import RandomWeights


class Repeater:
    """Plays a CUDA graph: what was recorded runs again and writes its result where it was, reading the same memory."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.num_replays = 0

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        first = work()
        self.order.append(first.shape[0])

        def replay() -> None:
            self.num_replays += 1
            first.copy_(work())

        return first, replay


def host_pool(model: str, dtype: str, num_pages: int = 200, page_size: int = 16) -> PoolView:
    layout = resolve_model(model).kv_layout(dtype, page_size)
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=num_pages, layout=layout, incarnation=1))
    view = PoolView(pool.pages_view, layout)
    # What a device's memory holds before it is written: numbers that must not be seen in any result.
    view.pages.fill_(torch.nan)
    return view


def device_runner(
    model: str | Path,
    dtype: str = "auto",
    *,
    num_pages: int = 200,
    page_size: int = 16,
    pooling: Pooling | None = None,
    **options: object,
) -> DeviceRunner:
    """`options` are fields of WorkerConfig."""
    name = str(model)
    config = WorkerConfig(group="g", model=name, agent="a", dtype=dtype, **options)
    spec = msgspec.structs.replace(resolve_model(name), pooling=pooling)
    return build_runner(spec, config, host_pool(name, dtype, num_pages, page_size))[0]


def replaying_runner(model: str | Path, sizes: list[int], dtype: str = "auto") -> tuple[DeviceRunner, Repeater]:
    spec = resolve_model(str(model))
    view = host_pool(str(model), dtype)
    torch_dtype = TORCH_DTYPES[spec.compute_dtype(dtype)]
    source = RandomWeights if spec.source == "random" else SafetensorsWeights
    with torch.inference_mode():
        network = DeviceNetwork(spec, source(spec, torch_dtype), TorchKernels(), torch.device("cpu"))
        attention, recorder = TorchAttention(view, spec.num_heads, kinds_of(spec)), Repeater()
        graphs = DecodeGraphs(network, attention, Buckets(sizes), recorder, 400)
    return DeviceRunner(network, attention, 16, 256, "test", graphs), recorder
