"""FlashInfer's kernels against plain torch on the same device, and the sampler against the CPU's."""

import pytest
import torch

from nodes.asks.logit_bias import LogitBias
from nodes.model_spec import resolve_model
from nodes.models.parts import Activation
from nodes.request import Sampling
from nodes.worker.cuda.few_rows import load_few_rows
from nodes.worker.cuda.flashinfer_backend import FlashInferKernels, load_flashinfer
from nodes.worker.cuda.heads import load_heads_kernel
from nodes.worker.draw.sampler import NOT_DRAWN, sample
from nodes.worker.ops.torch.attention import HeadForm
from nodes.worker.ops.torch.hidden import Hidden, Unnormed
from nodes.worker.ops.torch.kernels import TorchKernels, cos_sin_table
from nodes.worker.pool.device_view import view_device_pages
from tests.gpu.worker.gpu_running import GPU, NEEDS_FLASHINFER, SLOW, Pages
from tests.nodes.worker.cuda.test_few_rows import by_torch
from tests.nodes.worker.cuda.test_heads import placed_by_torch
from tests.nodes.worker.torch_running import asking, drawing_of

pytestmark = GPU
# One rounding to bfloat16 apart.
NEAR = {"atol": 2**-7, "rtol": 2**-7}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(torch.bfloat16)


def test_the_pool_is_seen_in_place() -> None:
    layout = resolve_model("random:qwen3-0.6b").kv_layout()
    pages = Pages(3 * layout.page_bytes)
    view = view_device_pages(pages, layout)
    assert view.pages.shape == (3, *layout.page_shape)
    assert view.pages.device == torch.device("cuda", 0)
    assert bool(view.pages.isnan().all())
    view.pages[1].zero_()
    assert pages.memory.view(3, -1).count_nonzero(-1).tolist() == [layout.page_bytes, 0, layout.page_bytes]


@NEEDS_FLASHINFER
@SLOW
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_kernels_agree_with_torch(rows: int) -> None:
    fast, plain = FlashInferKernels(load_flashinfer()), TorchKernels()
    spec = resolve_model("random:qwen3-0.6b")
    x, residual, weight = drawn(rows, 1024), drawn(rows, 1024), drawn(1024)
    assert torch.allclose(fast.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6), **NEAR)
    found = (x.clone(), residual.clone())
    fast.add_rms_norm(*found, weight, 1e-6)
    expected = (x.clone(), residual.clone())
    plain.add_rms_norm(*expected, weight, 1e-6)
    assert torch.equal(found[1], expected[1])
    # FlashInfer norms the sum before it is rounded, torch after.
    assert torch.allclose(found[0], expected[0], atol=2**-5, rtol=2**-5)
    gate_up = drawn(rows, 2 * 3072)
    for activation in ("silu", "gelu_tanh"):
        assert torch.allclose(fast.gated(gate_up, activation), plain.gated(gate_up, activation), **NEAR)
    joint = drawn(rows, 32, 128)
    table = cos_sin_table(spec, spec.rope, torch.device("cuda"))
    positions = torch.randint(0, spec.context_length, (rows,), device="cuda", dtype=torch.int32)
    results = []
    for kernels in (fast, plain):
        q, k, _ = torch.split(joint.clone(), [16, 8, 8], 1)
        kernels.head_norm(q, weight[:128], 1e-6)
        kernels.head_norm(k, weight[128:256], 1e-6)
        kernels.rotate(positions, q, k, table)
        results.append(torch.cat((q, k), 1))
    assert torch.allclose(*results, atol=2**-5, rtol=2**-5)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("has_norms", [True, False])
def test_heads_are_placed_as_by_torch(has_norms: bool, rows: int) -> None:
    """Under a graph too, as decode steps have it."""
    spec = resolve_model("random:qwen3-0.6b")
    layout = spec.kv_layout()
    pages = Pages(30 * layout.page_bytes)
    view = view_device_pages(pages, layout)
    layers = [(view.pages[:, i, 0], view.pages[:, i, 1]) for i in range(layout.num_layers)]
    kernel = load_heads_kernel(layers, 16)
    weights = (drawn(128), drawn(128)) if has_norms else (None, None)
    form = HeadForm(*weights, 1e-6, 1e-6, 1.0, cos_sin_table(spec, spec.rope, torch.device("cuda")))
    positions = torch.randint(0, spec.context_length, (rows,), device="cuda", dtype=torch.int32)
    places = torch.randperm(29 * 16, device="cuda")[:rows].to(torch.int32)
    write_pages, write_offsets = 1 + places // 16, places % 16
    heads, expected = (one.clone() for one in [drawn(rows, 32, 128)] * 2)
    expected_pages = view.pages.clone()
    placed_by_torch(
        expected, form, positions, expected_pages[:, 5, 0], expected_pages[:, 5, 1], write_pages, write_offsets
    )
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kernel.launch(5, heads, form, positions, write_pages, write_offsets)
    graph.replay()
    torch.cuda.synchronize()
    near = {"atol": 2**-5, "rtol": 2**-6}
    assert torch.allclose(heads.float(), expected.float(), **near)
    assert torch.allclose(view.pages.float(), expected_pages.float(), equal_nan=True, **near)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_products_of_few_rows_are_those_of_operations(rows: int, activation: Activation | None) -> None:
    """Under a graph, with norm and without, outputs and inputs that no block divides."""
    kernel = load_few_rows(torch.device("cuda:0"))
    for num_out, num_in, has_bias in ((1024, 3072, False), (4500, 896, True), (1532, 904, True), (24, 4096, False)):
        weight = drawn(num_out * (2 if activation else 1), num_in) * 0.1
        bias = drawn(len(weight)) if has_bias else None
        assert kernel.takes(weight, rows, activation)
        for is_pending in (None, False, True) if kernel.takes_norm(rows, num_in) else (None,):
            x, pending, norm = drawn(rows, num_in), drawn(rows, num_in) if is_pending else None, drawn(num_in)

            def taken(
                x: torch.Tensor = x, pending: torch.Tensor | None = pending, norm: torch.Tensor = norm
            ) -> torch.Tensor | Unnormed:
                hidden = Hidden(x.clone(), None if pending is None else pending.clone())
                return x if is_pending is None else Unnormed(hidden, norm, 1e-6, TorchKernels())  # noqa: B023

            given = taken()
            kernel.product(given, weight, bias, activation)
            given = taken()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                found = kernel.product(given, weight, bias, activation)
            graph.replay()
            torch.cuda.synchronize()
            reference = taken()
            expected = by_torch(reference, weight, bias, activation)
            assert torch.allclose(found.float(), expected.float(), atol=2**-3, rtol=2**-6)
            if is_pending:
                assert torch.equal(given.hidden.rows, reference.hidden.rows)


KINDS = [
    Sampling(temperature=0.0), Sampling(seed=1), Sampling(seed=2, top_p=0.9), Sampling(seed=3, top_k=50),
    Sampling(seed=4, min_p=0.02), Sampling(seed=5, top_k=40, top_p=0.8), asking(LogitBias({3: 30.0}), seed=6),
    Sampling(seed=7, temperature=9.0), Sampling(seed=8, top_p=0.99), Sampling(seed=9, top_k=3000),
]  # fmt: skip


def test_draws_are_those_of_the_cpu() -> None:
    torch.manual_seed(5)
    logits = torch.randn(2000, 20_000) * 3
    draws = [drawing_of(KINDS[i % len(KINDS)], i) for i in range(2000)]
    found, expected = sample(logits.cuda(), draws).tolist(), sample(logits, draws).tolist()
    differing = [i for i in range(2000) if found[i] != expected[i]]
    # Where a number falls within a rounding of the border between two tokens the devices may disagree.
    assert len(differing) <= 2, differing
    assert all(draws[i].sampling.temperature > 0 for i in differing)


def test_draws_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(6)
    logits = (torch.randn(64, 151_936) * 3).to(torch.bfloat16).cuda()
    draws = [drawing_of(KINDS[i % len(KINDS)], i) for i in range(64)]
    together = sample(logits, draws).tolist()
    assert [sample(logits[i : i + 1], [draws[i]]).item() for i in range(64)] == together


def test_greedy_is_the_lowest_of_the_highest_and_rows_that_overflow_are_not_drawn() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randint(-3, 4, (64, 151_936), device="cuda").to(dtype)
        expected = [row.index(max(row)) for row in rows.tolist()]
        rows[7, 9] = torch.nan
        rows[8] = -torch.inf
        expected[7:9] = [NOT_DRAWN] * 2
        assert sample(rows, [drawing_of(KINDS[0], 0)] * 64).tolist() == expected
