"""Layers of every kind through FlashInfer's kernels against plain torch on the same device and pages."""

import pytest
import torch

from nodes.worker.cuda.flashinfer_backend import FlashInferAttention, load_flashinfer
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.kinds import FULL
from nodes.worker.pool.device_view import view_device_pages
from nodes.worker.pool.view import PoolView
from tests.gpu.worker.gpu_running import GPU, NEEDS_FLASHINFER, SLOW, Pages
from tests.nodes.worker.cuda.attention_cases import KINDS, MIXED, NUM_PAGES, Shape, attend, batch_of, layout_of, rows_of

pytestmark = [*GPU, NEEDS_FLASHINFER, SLOW]
NEAR = {"atol": 0.02, "rtol": 0.02}
# By the kernel without tensor cores, and by that of prefill.
HEADS = [(4, 2), (8, 2)]
SINGLE_ROWS = [Shape(cached, 1) for cached in (0, 36, 37, 38, 200)]
CHUNKS = [Shape(0, 40), Shape(16, 16), Shape(100, 77), Shape(35, 2)]


def random_pool(num_heads: int, num_kv_heads: int, kinds: tuple = KINDS) -> tuple[PoolView, Pages]:
    layout = layout_of(num_heads, num_kv_heads, 64, "bfloat16", kinds)
    pages = Pages(NUM_PAGES * layout.page_bytes)
    view = view_device_pages(pages, layout)
    torch.manual_seed(99)
    view.pages.copy_(torch.randn(view.pages.shape, device="cuda"))
    return view, pages


@pytest.mark.parametrize("shapes", [MIXED, SINGLE_ROWS, CHUNKS], ids=["mixed", "single", "chunks"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_every_kind_agrees_with_torch(heads: tuple[int, int], deterministic: bool, shapes: list[Shape]) -> None:
    view, _pages = random_pool(*heads)
    batch = batch_of(shapes)
    q, k, v = rows_of(batch, heads[0], view.layout, torch.bfloat16, "cuda")
    expected = attend(TorchAttention(view, heads[0], KINDS), batch, q, k, v, KINDS)
    fast = FlashInferAttention(load_flashinfer(), view, heads[0], 512, KINDS, deterministic=deterministic)
    # Twice: what one kind's run leaves in the shared workspace must not show in the next plan.
    for _ in range(2):
        found = attend(fast, batch, q, k, v, KINDS)
        for layer, kind in enumerate(KINDS):
            assert torch.allclose(found[layer].float(), expected[layer].float(), **NEAR), kind


def test_a_prefix_as_long_as_a_context() -> None:
    """The kernel splits it, and joins the parts itself."""
    view, _pages = random_pool(8, 2, (FULL,))
    batch = batch_of([Shape(1600, 30)])
    q, k, v = rows_of(batch, 8, view.layout, torch.bfloat16, "cuda")
    expected = attend(TorchAttention(view, 8, (FULL,)), batch, q, k, v, (FULL,))[0]
    fast = FlashInferAttention(load_flashinfer(), view, 8, 64, (FULL,), deterministic=False)
    found = attend(fast, batch, q, k, v, (FULL,))[0]
    assert torch.allclose(found.float(), expected.float(), **NEAR)
