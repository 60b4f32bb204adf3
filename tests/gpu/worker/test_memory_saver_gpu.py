"""torch-memory-saver on a GPU: weights leave the device and come back at their addresses, bit for bit."""

import importlib.util

import pytest
import torch

from nodes.model_spec import resolve_model
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.load import build_runner
from nodes.worker.pool.device_view import view_device_pages
from tests.gpu.worker.gpu_running import BACKENDS, GPU, Pages
from tests.nodes.worker.cuda.test_device_runner import IDS
from tests.nodes.worker.torch_running import logits_by_chunks

pytestmark = [
    *GPU,
    pytest.mark.skipif(not importlib.util.find_spec("torch_memory_saver"), reason="needs torch-memory-saver"),
]
MODEL = "random:qwen2.5-0.5b"


@pytest.mark.parametrize("attention", BACKENDS)
def test_weights_are_gone_and_come_back_as_they_were(attention: str) -> None:
    spec = resolve_model(MODEL)
    layout = spec.kv_layout("bfloat16", 16)
    config = WorkerConfig(
        group="g", model=MODEL, agent="a", dtype="bfloat16", device="cuda:0", attention=attention, memory_saver=True,
        max_batch_tokens=512,
    )  # fmt: skip
    pages = Pages(200 * layout.page_bytes)
    runner, network, _ = build_runner(spec, config, view_device_pages(pages, layout))
    ids = [token % 1000 for token in IDS]
    before = logits_by_chunks(runner, ids, list(range(20, 30)), [100, 50])
    held = torch.cuda.mem_get_info()[0]
    runner.unmap(backs_up=True)
    free = torch.cuda.mem_get_info()[0]
    assert free - held >= 0.95 * network.weight_bytes
    fresh = Pages(200 * layout.page_bytes)
    runner.view_of = lambda _pool: view_device_pages(fresh, layout)
    runner.remap(None)  # the view is given
    assert torch.equal(logits_by_chunks(runner, ids, list(range(20, 30)), [100, 50]), before)
