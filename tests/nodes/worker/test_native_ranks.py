"""Ranks of a group compute by native kernels: what transformers computes, the same bits in any mix, or none at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import resolve_model
from nodes.models.pooling import Pooling
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import CollectiveFailed
from nodes.worker.ops.native import load
from nodes.worker.ops.native.builds import Choice
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.torch.load import load_host_runner
from nodes.worker.ops.torch.runner import TorchRunner
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.steps.step import PipelinedRunner
from tests.nodes.worker.cuda.rank_running import in_ranks
from tests.nodes.worker.native_builds import build_all
from tests.nodes.worker.test_parity import LLAMA3, PLAIN, save_model
from tests.nodes.worker.torch_running import Row, logits_by_chunks, step

IDS = [(37 * n) % 300 for n in range(150)]
# Heads, KV heads that are repeated, and the vocabulary (300) over four ranks and more; experts cut in their columns.
KINDS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "llama-biases-untied": (
        "llama",
        {"heads": (8, 2), "hidden": 64, "rope": LLAMA3, "attention_bias": True, "mlp_bias": True, "tied": False},
        (2, 8),
    ),
    "qwen2-tied": ("qwen2", {"heads": (4, 4), "hidden": 64, "rope": PLAIN}, (4,)),
    "gemma3": ("gemma3_text", {"heads": (4, 2), "hidden": 48, "head_dim": 16, "rope": PLAIN}, (2,)),
    "qwen3-moe": (
        "qwen3_moe",
        {"heads": (4, 2), "hidden": 48, "head_dim": 16, "rope": PLAIN, "tied": False, "moe_intermediate_size": 32,
         "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
        (2,),
    ),
}  # fmt: skip
CASES = [(name, size) for name, (_, _, sizes) in KINDS.items() for size in sizes]


def rank_of(
    model: Path | str, group: Collectives, dtype: str = "auto", pooling: Pooling | None = None, **options: Any
) -> NativeRunner | TorchRunner:
    spec = msgspec.structs.replace(resolve_model(str(model)), pooling=pooling)
    layout = spec.kv_layout(dtype, 16, group.rank, group.size)
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=60, layout=layout, incarnation=1))
    config = WorkerConfig(group="g", model=spec.name, agent="a", dtype=dtype, num_threads=1, **options)
    return load_host_runner(spec, config, pool, group)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_ranks_compute_what_transformers_does_in_any_chunks(tmp_path: Path, name: str, size: int) -> None:
    build_all()
    kind, options, _ = KINDS[name]
    reference = save_model(tmp_path, kind, **options)
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0]

    def of_rank(group: Collectives) -> tuple[str, torch.Tensor, list[int]]:
        runner = rank_of(tmp_path, group)
        assert isinstance(runner, NativeRunner)
        whole = logits_by_chunks(runner, IDS, list(range(1, 11)), [150])
        chunks = logits_by_chunks(runner, IDS, list(range(11, 21)), [16, 48, 33, 1, 22, 29, 1])
        assert torch.equal(chunks[-1], whole[0])
        mixed = runner.logits(step(Row(149, IDS[149:], range(1, 11)), Row(0, IDS[:97], range(21, 28))))
        assert torch.equal(mixed[0], whole[0])
        assert torch.equal(mixed[1], chunks[2])
        drawn = runner.run(step(Row(149, IDS[149:], range(1, 11)), Row(64, IDS[64:97], range(21, 28)))).token_ids
        assert drawn == [int(mixed[0].argmax()), int(mixed[1].argmax())]
        return runner.numerics, chunks, drawn

    found = in_ranks(size, of_rank)
    ends = torch.tensor([16, 48, 33, 1, 22, 29, 1]).cumsum(0) - 1
    for numerics, chunks, drawn in found:
        assert f"-tp{size}/any/" in numerics
        assert (numerics, drawn) == (found[0][0], found[0][2])
        assert torch.equal(chunks, found[0][1])
        assert torch.allclose(chunks, expected[ends], atol=1e-4, rtol=0)


def test_bfloat16_is_near_float32() -> None:
    build_all()

    def of_rank(group: Collectives) -> torch.Tensor:
        rough, right = (rank_of("random:tiny-qwen3", group, dtype) for dtype in ("bfloat16", "float32"))
        plan = step(Row(0, IDS, range(1, 11)))
        return torch.stack([rough.logits(plan)[0].float(), right.logits(plan)[0]])

    for rough, right in in_ranks(2, of_rank):
        assert torch.nn.functional.cosine_similarity(rough, right, 0) > 0.999


def test_a_step_that_raises_at_one_rank_ends_the_group() -> None:
    build_all()
    plan = step(Row(0, IDS, range(1, 11)))

    def of_rank(group: Collectives) -> str:
        runner = rank_of("random:tiny-qwen3", group)
        assert isinstance(runner, NativeRunner)
        if group.rank:
            runner._steps._program.run = fails
        with pytest.raises(CollectiveFailed) as raised:
            runner.run(plan)
        return str(raised.value)

    def fails(*_: Any) -> None:
        raise ValueError("here alone")

    told, failed = in_ranks(2, of_rank)
    assert failed == "step 1 failed at rank 1: ValueError: here alone"
    assert "rank 1 is gone" in told


def test_what_one_rank_cannot_compute_natively_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    build_all()
    fitting: Callable[..., Any] = load.choose_library

    def of_rank(group: Collectives) -> tuple[str, torch.Tensor]:
        runner = rank_of("random:tiny-qwen3", group, kernels="torch" if group.rank else "auto")
        assert isinstance(runner, TorchRunner)
        assert not isinstance(runner, PipelinedRunner), "on the CPU there is nothing to wait for"
        whole = runner.logits(step(Row(0, IDS, range(1, 11))))[0]
        chunks = logits_by_chunks(runner, IDS, list(range(11, 21)), [16, 48, 33, 1, 22, 29, 1])
        assert torch.equal(chunks[-1], whole)
        return runner.numerics, whole

    monkeypatch.setattr(
        load, "choose_library", lambda wanted: fitting(wanted) if wanted == "auto" else Choice(None, "")
    )
    (numerics, logits), other = in_ranks(2, of_rank)
    assert numerics == other[0]
    assert "/packed-tp2/rows4/" in numerics
    assert torch.equal(logits, other[1])
