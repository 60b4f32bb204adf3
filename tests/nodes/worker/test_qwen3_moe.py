"""Qwen3-MoE agrees with transformers, alone and in two ranks; a row's experts do not depend on the rows beside it."""

import json
from pathlib import Path

import pytest
import torch

from nodes.model_spec import ModelDamaged, ModelUnsupported, resolve_model
from tests.nodes.worker.test_parity import PLAIN, assert_all_agree, assert_two_ranks_agree, save_model
from tests.nodes.worker.torch_running import logits_by_chunks, make_runner

OPTIONS = {
    "heads": (4, 2), "hidden": 48, "rope": PLAIN, "tied": False, "moe_intermediate_size": 32, "num_experts": 6,
    "num_experts_per_tok": 3, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("normalized", [False, True])
def test_qwen3_moe(tmp_path: Path, normalized: bool) -> None:
    reference = save_model(tmp_path, "qwen3_moe", norm_topk_prob=normalized, **OPTIONS)
    assert_all_agree(tmp_path, reference)
    assert_two_ranks_agree(tmp_path, reference)


def test_same_bits_and_what_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **OPTIONS)
    tokens = [(37 * n) % 300 for n in range(90)]
    for kernels in ("auto", "torch"):
        runner = make_runner(tmp_path, kernels=kernels)
        assert "/varies/" not in runner.numerics
        whole = logits_by_chunks(runner, tokens, list(range(1, 7)), [90])[0]
        chunked = logits_by_chunks(runner, tokens, list(range(7, 13)), [13, 70, 6, 1])[-1]
        assert torch.equal(whole, chunked)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, kind, words in (
        ({"mlp_only_layers": [1]}, ModelUnsupported, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, ModelUnsupported, "decoder_sparse_step"),
        ({"num_experts_per_tok": 7}, ModelDamaged, "more than the 6 experts"),
        ({"num_experts": 7}, ModelDamaged, r"no tensor 'model\.layers\.0\.mlp\.experts\.6|has shape \[6, 48\]"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(kind, match=words):
            resolve_model(str(tmp_path))
