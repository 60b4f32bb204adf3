"""What is asked for and is not there is said before anything is loaded."""

import pytest
import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import resolve_model
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.load import build_runner, fingerprint
from nodes.worker.errors import BackendMissing, DeviceUnfit
from nodes.worker.executor.runners import make_runner
from nodes.worker.pool.device_view import _CudaBytes, _in_place, view_device_pages
from tests.nodes.worker.cuda.device_running import host_pool

MODEL = "random:tiny-qwen3"


def config(**options: object) -> WorkerConfig:
    return WorkerConfig(group="g", model=MODEL, agent="a", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device() -> None:
    spec = resolve_model(MODEL)
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=4, layout=spec.kv_layout(), incarnation=1))
    with pytest.raises(BackendMissing, match="sees no CUDA device"):
        make_runner(spec, config(device="cuda"), pool)


def test_flashinfer_on_the_cpu() -> None:
    with pytest.raises(BackendMissing, match="the pool is on cpu"):
        build_runner(resolve_model(MODEL), config(attention="flashinfer"), host_pool(MODEL, "auto", 8))


def test_fingerprints_differ_by_what_bits_depend_on() -> None:
    cpu = torch.device("cpu")
    seen = {
        fingerprint(cpu, dtype, attention, graphs=graphs, deterministic=deterministic)
        for dtype in (torch.float32, torch.bfloat16)
        for attention in ("torch", "flashinfer-0.6.13")
        for graphs in (False, True)
        for deterministic in (False, True)
    }
    assert len(seen) == 16
    assert all(torch.__version__ in name for name in seen)


class Pages:
    """What a pool says of its pages."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.pointer, self.num_bytes, self.device = pointer, num_bytes, 0


def test_half_a_page_is_no_pool() -> None:
    layout = resolve_model(MODEL).kv_layout()
    with pytest.raises(DeviceUnfit, match="not a multiple"):
        view_device_pages(Pages(4096, layout.page_bytes + 1), layout)


def test_a_copy_in_the_place_of_the_memory_is_refused() -> None:
    with pytest.raises(DeviceUnfit, match="CUDA_VISIBLE_DEVICES"):
        _in_place(torch.zeros(8, dtype=torch.uint8), Pages(4096, 8))
    interface = _CudaBytes(4096, 8).__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"]) == ((8,), "|u1", (4096, False))
