"""Qwen3-MoE agrees with transformers, alone and in two ranks; a row's experts do not depend on the rows beside it."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from nodes.model_spec import ModelDamaged, TensorParallelUnfit, resolve_model
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.pool.device_memory import parameter_bytes
from tests.nodes.worker.cuda.rank_running import in_ranks
from tests.nodes.worker.test_native_ranks import rank_of
from tests.nodes.worker.test_parity import PLAIN, assert_agrees, assert_all_agree, assert_two_ranks_agree, save_model
from tests.nodes.worker.torch_running import Row, logits_by_chunks, make_runner, step

OPTIONS = {
    "heads": (4, 2), "hidden": 48, "rope": PLAIN, "tied": False, "moe_intermediate_size": 32, "num_experts": 6,
    "num_experts_per_tok": 3, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("normalized", [False, True])
def test_qwen3_moe(tmp_path: Path, normalized: bool) -> None:
    reference = save_model(tmp_path, "qwen3_moe", norm_topk_prob=normalized, **OPTIONS)
    assert_all_agree(tmp_path, reference)
    assert_two_ranks_agree(tmp_path, reference)


MIXED = {
    "mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 4, "moe_intermediate_size": 24, "inner": 104,
}  # fmt: skip


def test_layers_without_experts_have_their_own_width(tmp_path: Path) -> None:
    """Layers 0 and 2 by the step, layer 1 by its number."""
    reference = save_model(tmp_path, "qwen3_moe", **OPTIONS | MIXED)
    spec = resolve_model(str(tmp_path))
    assert (spec.dense_layers, spec.dense_size, spec.intermediate_size, spec.num_experts) == ((0, 1, 2), 104, 24, 6)
    assert_all_agree(tmp_path, reference)
    assert_two_ranks_agree(tmp_path, reference)
    bytes_of = {size: parameter_bytes(spec, "float32", size) for size in (1, 2)}
    weights = load_file(tmp_path / "model.safetensors")
    assert bytes_of[1] == sum(tensor.nbytes for tensor in weights.values())
    whole = sum(tensor.nbytes for name, tensor in weights.items() if "norm" in name or name.endswith("mlp.gate.weight"))
    assert bytes_of[2] == whole + (bytes_of[1] - whole) // 2
    assert spec.shard(1, 2).dense == range(52, 104)
    with pytest.raises(TensorParallelUnfit, match="its 102 feed-forward columns"):
        msgspec.structs.replace(spec, dense_size=102).shard(0, 4)


def test_every_layer_has_the_window(tmp_path: Path) -> None:
    """Also those below `max_window_layers`, which other Qwen3 models except."""
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    reference = save_model(tmp_path, "qwen3_moe", **OPTIONS | window)
    assert resolve_model(str(tmp_path)).layer_windows == (9, 9, 9)
    assert_all_agree(tmp_path, reference)
    assert_two_ranks_agree(tmp_path, reference)


@pytest.mark.parametrize("size", [2, 4])
def test_native_ranks_compute_layers_with_and_without_experts(tmp_path: Path, size: int) -> None:
    reference = save_model(tmp_path, "qwen3_moe", **OPTIONS | MIXED | {"heads": (4, 4)})
    ids = [(37 * n) % 300 for n in range(60)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, -1]
    for runner in in_ranks(size, lambda group: rank_of(tmp_path, group)):
        assert isinstance(runner, NativeRunner)
    plan = step(Row(0, ids, [1, 2, 3, 4]))
    for found in in_ranks(size, lambda group: rank_of(tmp_path, group).logits(plan)[0]):
        assert torch.allclose(found, expected, atol=1e-4, rtol=0)


def test_int8_of_layers_with_and_without_experts(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **OPTIONS | MIXED)
    ids = [(37 * n) % 300 for n in range(60)]
    plain = logits_by_chunks(make_runner(tmp_path), ids, [1, 2, 3, 4], [60])[0]
    native, oracle = (
        logits_by_chunks(make_runner(tmp_path, quantize="int8", kernels=kernels), ids, [1, 2, 3, 4], [60])[0]
        for kernels in ("auto", "torch")
    )
    assert torch.allclose(native, oracle, atol=1e-3, rtol=0)
    assert not torch.allclose(native, plain, atol=1e-3, rtol=0)


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 9}, {"mlp_only_layers": [2, 0, 1, 7]}, {"num_experts": 0}])
def test_no_layer_may_have_experts(tmp_path: Path, change: dict) -> None:
    reference = save_model(tmp_path, "qwen3_moe", **OPTIONS | change)
    spec = resolve_model(str(tmp_path))
    assert (spec.num_experts, spec.dense_layers, spec.intermediate_size) == (0, (), 96)
    assert_agrees(make_runner(tmp_path), reference)


def test_what_has_no_meaning_here_is_not_asked_for(tmp_path: Path) -> None:
    """A width of layers that are not there, and numbers of layers that are not there."""
    reference = save_model(tmp_path, "qwen3_moe", mlp_only_layers=[-1, 9], **OPTIONS)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["intermediate_size"]
    path.write_text(json.dumps(config))
    assert resolve_model(str(tmp_path)).dense_layers == ()
    assert_agrees(make_runner(tmp_path), reference)


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
        ({"mlp_only_layers": [1]}, ModelDamaged, r"no tensor 'model\.layers\.1\.mlp\.gate_proj"),
        ({"decoder_sparse_step": 2}, ModelDamaged, r"no tensor 'model\.layers\.0\.mlp\.gate_proj"),
        ({"decoder_sparse_step": 0}, ModelDamaged, "decoder_sparse_step should be a positive integer"),
        ({"mlp_only_layers": ["1"]}, ModelDamaged, "mlp_only_layers is not an index or a list of indices"),
        ({"num_experts_per_tok": 7}, ModelDamaged, "more than the 6 experts"),
        ({"num_experts": 7}, ModelDamaged, r"no tensor 'model\.layers\.0\.mlp\.experts\.6|has shape \[6, 48\]"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(kind, match=words):
            resolve_model(str(tmp_path))
