"""Models with int8 weights: what is rounded, that both implementations agree, that answers stay right."""

import json
from pathlib import Path

import pytest
import torch

from nodes.model_spec import resolve_model
from nodes.worker.config import ConfigError, WorkerConfig
from nodes.worker.weights.quantization import QuantizedWeights, quantized_names
from nodes.worker.weights.random_weights import RandomWeights
from tests.nodes.worker.test_parity import save_model
from tests.nodes.worker.test_qwen3_moe import OPTIONS as EXPERTS
from tests.nodes.worker.test_tiny import NUM_TOKENS, PROMPTS, encode, write
from tests.nodes.worker.torch_running import GREEDY, logits_by_chunks, make_runner

TOKENS = [(37 * n) % 300 for n in range(90)]


def test_matrices_are_rounded_and_nothing_else(tmp_path: Path) -> None:
    spec = resolve_model("random:tiny-qwen2")
    assert quantized_names(spec) == frozenset()
    rounded = spec.quantized("int8")
    assert rounded.fingerprint != spec.fingerprint
    assert rounded.kv_layout() != spec.kv_layout(), "pages of one are not those of the other"
    names = quantized_names(rounded)
    plain = RandomWeights(spec, torch.float32)
    weights = QuantizedWeights(plain, rounded)
    for name, parameter in plain._parameters.items():
        is_matrix = len(parameter.shape) == 2
        assert (name in names) == is_matrix
        assert torch.equal(weights.tensor(name), plain.tensor(name)) != is_matrix
    save_model(tmp_path, "qwen3_moe", **EXPERTS)
    names = quantized_names(resolve_model(str(tmp_path)).quantized("int8"))
    assert "model.layers.0.mlp.experts.5.down_proj.weight" in names
    assert "model.layers.0.mlp.gate.weight" not in names, "a router that chooses otherwise is another model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["random:tiny-qwen2", "random:tiny-llama", "experts"])
def test_kernels_agree_and_bits_depend_on_nothing(model: str, dtype: str, tmp_path: Path) -> None:
    """Tied and untied heads, layers of experts."""
    if model == "experts":
        save_model(tmp_path, "qwen3_moe", **EXPERTS)
        model = str(tmp_path)
    whole = {}
    for kernels in ("auto", "torch"):
        runner = make_runner(model, dtype, kernels=kernels, quantize="int8", num_threads=2)
        assert f"/{dtype}-int8/" in runner.numerics
        assert "/varies/" not in runner.numerics
        whole[kernels] = logits_by_chunks(runner, TOKENS, list(range(1, 7)), [90])[0]
        assert torch.equal(logits_by_chunks(runner, TOKENS, list(range(7, 13)), [13, 70, 6, 1])[-1], whole[kernels])
    plain = logits_by_chunks(make_runner(model, dtype), TOKENS, list(range(1, 7)), [90])[0].float()
    deviation = float(plain.std())
    difference = float((whole["auto"].float() - whole["torch"].float()).abs().max())
    assert difference < (1e-4 if dtype == "float32" else 0.15) * deviation
    assert not torch.equal(whole["auto"].float(), plain)
    assert float((whole["auto"].float() - plain).abs().max()) < 0.5 * deviation


def test_the_bundled_model_writes_what_it_wrote_before() -> None:
    plain, rounded = make_runner("tiny"), make_runner("tiny", quantize="int8")
    samples = json.loads((Path(resolve_model("tiny").path) / "samples.json").read_text())
    asked = [one["messages"][0]["content"] for one in samples if len(one["messages"]) == 1]
    for prompt in map(encode, [*PROMPTS, *asked[:20]]):
        assert write(rounded, prompt, [], NUM_TOKENS, GREEDY) == write(plain, prompt, [], NUM_TOKENS, GREEDY)


@pytest.mark.parametrize(
    "fields", [{"device": "cuda"}, {"tp_size": 2, "workers": ("a", "b")}, {"device": "cuda:1"}], ids=repr
)
def test_workers_that_cannot_are_not_configured(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="int8"):
        WorkerConfig(group="g", model="tiny", agent="a", quantize="int8", **fields)
