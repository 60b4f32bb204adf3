"""The runner on a GPU: bfloat16 against transformers, FlashInfer against torch, with and without graphs, ahead."""

from pathlib import Path

import pytest
import torch

from nodes.worker.cuda.memory import measured_activation_bytes
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.pool.device_memory import activation_bytes
from tests.gpu.worker.gpu_running import BACKENDS, GPU, NEEDS_FLASHINFER, SLOW, Built, build
from tests.nodes.worker.cuda.test_device_runner import IDS, decode_step, mixed_step, text
from tests.nodes.worker.test_parity import save_model
from tests.nodes.worker.torch_running import Row, logits_by_chunks, step, with_rows

pytestmark = GPU
MODEL = "random:tiny-qwen3"
SLIDING = "random:tiny-qwen2-sliding"
"""Full and sliding layers; sequences of `text` outgrow the window of 40 while they decode."""
ROPE = {"rope_type": "default", "rope_theta": 1e6}
SIZES = [16, 48, 33, 1, 22, 29, 1]
PARITY = {
    "llama": {"heads": (4, 4), "hidden": 256, "tied": False},
    "qwen2": {"heads": (14, 2), "hidden": 896},
    "qwen3": {"heads": (8, 2), "hidden": 256, "head_dim": 128},
    # A window shorter than the 150 tokens.
    "mistral": {"heads": (8, 2), "hidden": 512, "sliding_window": 50},
}


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("kind", PARITY)
def test_bfloat16_agrees_with_transformers(tmp_path: Path, kind: str, attention: str) -> None:
    """Both are compared with float32: ours may be half as far off again as transformers' own bfloat16."""
    reference = save_model(tmp_path / "model", kind, rope=ROPE, **PARITY[kind])
    ids = [token % 300 for token in IDS]
    with torch.no_grad():
        exact = reference.cuda()(torch.tensor([ids]).cuda()).logits[0]
        theirs = reference.to(torch.bfloat16)(torch.tensor([ids]).cuda()).logits[0].float()
    built = build(tmp_path / "model", attention)
    found = logits_by_chunks(built.runner, ids, list(range(20, 30)), SIZES).float()
    ends = torch.tensor(SIZES).cumsum(0) - 1
    error, allowed = (found - exact[ends]).abs(), (theirs - exact).abs()
    assert exact.std() > 0.3, "logits all alike would agree with anything"
    assert float(error.mean()) < 1.5 * float(allowed.mean())
    assert float(error.max()) < 2 * float(allowed.max())


@NEEDS_FLASHINFER
@SLOW
@pytest.mark.parametrize("model", [MODEL, "random:tiny-qwen2", "random:tiny-mistral", SLIDING])
@pytest.mark.parametrize("deterministic", [False, True])
def test_flashinfer_agrees_with_torch(model: str, deterministic: bool) -> None:
    fast = build(model, "flashinfer", deterministic=deterministic)
    found, expected = (
        logits_by_chunks(one.runner, IDS, list(range(1, 11)), SIZES) for one in (fast, build(model, "torch"))
    )
    assert torch.allclose(found.float(), expected.float(), atol=0.03, rtol=0.03)
    assert not found.isnan().any(), "what pages hold behind the last position is not seen"


@pytest.mark.parametrize("attention", BACKENDS)
def test_rows_of_a_mixed_step_do_not_see_each_other(attention: str) -> None:
    runner = build(MODEL, attention).runner
    for base in (1, 50):
        for first, count in ((0, 32), (4, 47), (10, 40)):
            pages = [base + first + i for i in range(4)][: -(-count // 16)]
            runner.run(step(Row(0, IDS[:count], pages, None, prompt=150)))
    together = runner.logits(mixed_step(1))
    plan = mixed_step(50)
    for row in plan.rows:
        alone = runner.logits(with_rows(plan, [row]))
        assert all(torch.allclose(alone[i].float(), together[i].float(), atol=0.02, rtol=0.02) for i in alone)


def ahead(runner: DeviceRunner, num_sequences: int, num_steps: int) -> list[list[int]]:
    """What `text` draws, every step launched before the one before is asked for."""
    rows = [Row(0, IDS[i : i + 10 + i], list(range(1 + 8 * i, 9 + 8 * i)), prompt=10 + i) for i in range(num_sequences)]
    launched = [runner.launch(step(*rows))]
    output: list[list[int]] = []
    for number in range(num_steps):
        positions = [10 + i + number for i in range(num_sequences)]
        sources = list(range(num_sequences))
        launched.append(runner.launch(decode_step([-1] * num_sequences, positions, from_rows=sources)))
        output.append(list(runner.finish(launched.pop(0)).token_ids))
    return [*output, list(runner.finish(launched.pop()).token_ids)]


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_steps_launched_ahead_draw_the_same(attention: str, num_sequences: int) -> None:
    runner = build(MODEL, attention).runner
    assert ahead(runner, num_sequences, 40) == text(runner, num_sequences, 40)


@NEEDS_FLASHINFER
@SLOW
@pytest.mark.parametrize("model", [MODEL, SLIDING])
def test_text_is_the_same_with_graphs_and_without(model: str) -> None:
    """Deterministic: padding to a bucket then does not change the last bits of any row."""
    plain = build(model, "flashinfer", deterministic=True).runner
    replaying = build(model, "flashinfer", deterministic=True, graphs=True).runner
    for count in (1, 3, 4, 5, 8, 17) if model == MODEL else (3, 17):
        expected = text(plain, count, 40)
        assert text(replaying, count, 40) == expected
        assert ahead(replaying, count, 40) == expected


@NEEDS_FLASHINFER
@SLOW
def test_graphs_agree_within_rounding_where_splits_are_free() -> None:
    plain, replaying = build(MODEL, "flashinfer"), build(MODEL, "flashinfer", graphs=True)
    for count in (1, 3, 8, 17):
        for built in (plain, replaying):
            text(built.runner, count, 1)
        plan = decode_step([7] * count, [11 + i for i in range(count)])
        expected, found = plain.runner.logits(plan), replaying.runner.logits(plan)
        assert all(torch.allclose(found[i].float(), expected[i].float(), atol=0.02, rtol=0.02) for i in expected)


@NEEDS_FLASHINFER
@SLOW
def test_the_bound_on_activations_holds() -> None:
    built: Built = build("random:qwen3-0.6b", "flashinfer", num_pages=4, max_batch_tokens=2048)
    with torch.inference_mode():
        measured = measured_activation_bytes(built.network, built.attention, 2048, 16)
    assert measured <= 1.2 * activation_bytes(built.network.spec, "bfloat16", 2048, 0)
