"""Prefill in two parts gives what one call gives: the arithmetic, the batch it is laid out from, and the setting."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.model_spec import resolve_model
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.load import build_runner
from nodes.worker.errors import BackendMissing
from nodes.worker.ops.torch.merged import attend_part, merge
from tests.nodes.worker.cuda.device_running import device_runner, host_pool
from tests.nodes.worker.cuda.test_device_runner import IDS, fill, mixed_step
from tests.nodes.worker.torch_running import Row, logits_by_chunks, step

MODEL = "random:tiny-qwen3"


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    cached=st.integers(0, 40),
    new=st.integers(1, 20),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_both_parts_together_are_attention_over_all(
    heads: tuple[int, int], cached: int, new: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(new, heads[0], 8) * scale
    k, v = torch.randn(2, cached + new, heads[1], 8)
    seen = torch.arange(cached + new) <= torch.arange(cached, cached + new).unsqueeze(1)
    batched = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*batched, seen, enable_gqa=True)[0].transpose(0, 1)
    among_new = attend_part(q, k[cached:], v[cached:], causal=True)
    over_cached = attend_part(q, k[:cached], v[:cached], causal=False)
    # Scores are as large as `scale`, and so are their roundings.
    near = {"atol": 1e-5 * max(scale, 1.0), "rtol": 0.0}
    assert torch.allclose(merge(*among_new, *over_cached), expected, **near)
    assert torch.allclose(merge(*over_cached, *among_new), expected, **near)
    if not cached:
        assert over_cached[1].eq(-torch.inf).all()
        assert torch.equal(over_cached[0], torch.zeros_like(q))


def test_sums_are_to_base_2() -> None:
    """Three keys of equal score 0 sum up to 3."""
    _, sums = attend_part(torch.zeros(1, 1, 4), torch.randn(3, 1, 4), torch.randn(3, 1, 4), causal=False)
    assert sums.item() == pytest.approx(1.5849625)


def test_a_runner_that_merges_gives_the_logits_of_one_that_does_not() -> None:
    sizes = [16, 48, 33, 1, 22, 29, 1]
    expected = logits_by_chunks(device_runner(MODEL, "float32"), IDS, list(range(1, 11)), sizes)
    runner = device_runner(MODEL, "float32", prefill_attention="merged")
    found = logits_by_chunks(runner, IDS, list(range(20, 30)), sizes)
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)
    assert "torch-merged" in runner.numerics


def test_sequences_with_and_without_a_prefix_in_one_step() -> None:
    """The mixed step has both, and single rows; its first chunk begins on a page's edge, the other inside a page."""
    plain, merging = device_runner(MODEL), device_runner(MODEL, prefill_attention="merged")
    for runner in (plain, merging):
        fill(runner, 1)
        runner.run(step(Row(0, IDS[:21], [30, 31], None)))
    inside = mixed_step(1)
    more = step(Row(21, IDS[21:40], [30, 31, 32]))
    for plan in (inside, more):
        expected, found = plain.logits(plan), merging.logits(plan)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[i], expected[i], atol=1e-5, rtol=0) for i in found)


@pytest.mark.parametrize("model", ["random:tiny-mistral", "random:tiny-qwen2-sliding"])
def test_windows_are_refused(model: str) -> None:
    config = WorkerConfig(group="g", model=model, agent="a", prefill_attention="merged")
    with pytest.raises(BackendMissing, match="set the worker's prefill_attention to paged") as caught:
        build_runner(resolve_model(model), config, host_pool(model, "auto", 8))
    assert caught.value.code == "backend_missing"
