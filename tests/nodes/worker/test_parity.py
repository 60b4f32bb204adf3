"""Float32 logits agree with transformers to 1e-4 on random small models that transformers itself saved."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.steps.step import RunnableStep
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.cuda.rank_running import in_ranks, rank_runner
from tests.nodes.worker.torch_running import Row, logits_by_chunks, make_runner, step

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
}
MSCALES = {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
# Each pair has its divisor, other ones in a context that is longer than the original.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + n / 16 for n in range(8)],
    "long_factor": [2.0 + n / 2 for n in range(8)],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha-untied-llama3": ("llama", {"heads": (4, 4), "hidden": 64, "rope": LLAMA3, "tied": False}),
    "llama-gqa2-tied-linear-biases": (
        "llama", {"heads": (4, 2), "hidden": 64, "rope": LINEAR, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-gqa7-head-dim-apart": ("llama", {"heads": (7, 1), "hidden": 112, "head_dim": 24, "rope": PLAIN}),
    "qwen2-gqa7-tied": ("qwen2", {"heads": (14, 2), "hidden": 112, "rope": PLAIN}),
    "qwen2-mha-untied-llama3": ("qwen2", {"heads": (3, 3), "hidden": 48, "rope": LLAMA3, "tied": False}),
    "qwen2-gqa2-linear": ("qwen2", {"heads": (4, 2), "hidden": 72, "rope": LINEAR, "inner": 100}),
    "qwen3-gqa2-head-dim-apart": ("qwen3", {"heads": (4, 2), "hidden": 64, "head_dim": 32, "rope": PLAIN}),
    "qwen3-mha-untied-linear": (
        "qwen3", {"heads": (2, 2), "hidden": 64, "head_dim": 48, "rope": LINEAR, "tied": False}
    ),
    "qwen3-gqa7-bias-llama3": (
        "qwen3", {"heads": (7, 1), "hidden": 56, "head_dim": 16, "rope": LLAMA3, "attention_bias": True}
    ),
    "llama-yarn": ("llama", {"heads": (4, 2), "hidden": 64, "rope": YARN}),
    "llama-yarn-of-mscales": ("llama", {"heads": (2, 2), "hidden": 64, "rope": YARN | MSCALES}),
    "llama-longrope-beyond": (
        "llama", {"heads": (4, 2), "hidden": 64, "rope": {**LONGROPE, "original_max_position_embeddings": 16}}
    ),
    "llama-longrope-within": (
        "llama", {"heads": (4, 2), "hidden": 64, "rope": {**LONGROPE, "original_max_position_embeddings": 512}}
    ),
    "mistral-gqa2-window": ("mistral", {"heads": (4, 2), "hidden": 64, "rope": PLAIN, "sliding_window": 37}),
    "mistral-one-kv-head-window-of-a-split": (
        "mistral", {"heads": (4, 1), "hidden": 64, "head_dim": 24, "rope": PLAIN, "sliding_window": 64, "tied": False}
    ),
    "mistral-without-window": ("mistral", {"heads": (2, 2), "hidden": 48, "rope": LINEAR, "sliding_window": None}),
    "qwen2-upper-layers-slide": (
        "qwen2", {
            "heads": (4, 2), "hidden": 64, "rope": PLAIN, "use_sliding_window": True, "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "qwen3-named-layers-slide": (
        "qwen3", {
            "heads": (4, 2), "hidden": 64, "head_dim": 16, "rope": PLAIN, "use_sliding_window": True,
            "sliding_window": 81,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip
NUM_TOKENS = 150


def save_model(
    directory: Path, kind: str, *, heads: tuple[int, int], hidden: int, rope: dict[str, Any], tied: bool = True,
    inner: int = 96, **others: Any,
) -> torch.nn.Module:  # fmt: skip
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        kind, vocab_size=300, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], rope_parameters=dict(rope), tie_word_embeddings=tied, initializer_range=0.08,
        **{"eos_token_id": 257, "max_position_embeddings": 512, "num_hidden_layers": 3} | others,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # transformers starts norms at one and biases at zero
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(300))
    return model


def assert_agrees(runner: Any, reference: torch.nn.Module) -> None:
    """Whole, in chunks and token by token, over pages."""
    ids = torch.randint(0, 300, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids.unsqueeze(0)).logits[0]
    assert expected.std() > 0.3, "logits all alike would agree with anything"
    tokens, pages = ids.tolist(), list(range(1, 11))

    whole = logits_by_chunks(runner, tokens, pages, [NUM_TOKENS])
    assert torch.allclose(whole[0], expected[-1], atol=1e-4, rtol=0)
    sizes = [16, 48, 33, 1, 22, 29, 1]
    chunked = logits_by_chunks(runner, tokens, list(range(20, 30)), sizes)
    ends = torch.tensor(sizes).cumsum(0) - 1
    assert torch.allclose(chunked, expected[ends], atol=1e-4, rtol=0)
    decoded = logits_by_chunks(runner, tokens, list(range(40, 50)), [124, *([1] * 26)])
    assert torch.allclose(decoded, expected[123:], atol=1e-4, rtol=0)


def assert_all_agree(directory: Path, reference: torch.nn.Module) -> None:
    """By whatever may compute an architecture: native kernels, torch, a device's operations; in bfloat16 roughly."""
    ids = list(range(90, 10, -1))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, -1]
    for make in (make_runner, partial(make_runner, kernels="torch"), device_runner):
        assert_agrees(make(directory), reference)
        rough = logits_by_chunks(make(directory, "bfloat16"), ids, list(range(1, 6)), [80])[0]
        assert bool((rough != expected).any())
        assert torch.nn.functional.cosine_similarity(rough.float(), expected, 0) > 0.999


def assert_two_ranks_agree(directory: Path, reference: torch.nn.Module) -> None:
    """Each of two ranks that compute together has the logits of the last position."""
    plan = step(Row(0, list(range(NUM_TOKENS)), list(range(1, 11))))
    with torch.no_grad():
        expected = reference(torch.arange(NUM_TOKENS).unsqueeze(0)).logits[0, -1]

    def of_rank(group: Collectives) -> torch.Tensor:
        return rank_runner(directory, group).logits(plan)[0]

    for found in in_ranks(2, of_rank):
        assert torch.allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(tmp_path: Path, name: str) -> None:
    kind, options = CASES[name]
    reference = save_model(tmp_path / "model", kind, **options)
    for make in (make_runner, device_runner):
        assert_agrees(make(tmp_path / "model"), reference)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_longrope_of_a_shorter_context_that_is_asked_for(tmp_path: Path, kernels: str) -> None:
    # transformers chooses by the call: all of these tokens lie within the original context.
    rope = {**LONGROPE, "original_max_position_embeddings": 200}
    reference = save_model(tmp_path / "model", "llama", heads=(4, 2), hidden=64, rope=rope)
    assert_agrees(make_runner(tmp_path / "model", kernels=kernels, context_length=200), reference)
    with pytest.raises(AssertionError):  # of the context that config.json has: the long factors, as nobody asked
        assert_agrees(make_runner(tmp_path / "model", kernels=kernels), reference)


def test_sharded_and_bfloat16_checkpoints(tmp_path: Path) -> None:
    kind, options = CASES["qwen2-gqa7-tied"]
    reference = save_model(tmp_path / "model", kind, **options)
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    (tmp_path / "model" / "model.safetensors").unlink(missing_ok=True)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    ids = list(range(100))
    with torch.no_grad():
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        expected = fresh(torch.tensor([ids])).logits[0, -1]
    in_float32 = logits_by_chunks(make_runner(tmp_path / "model", "float32"), ids, list(range(1, 8)), [100])[0]
    assert torch.allclose(in_float32, expected, atol=1e-4, rtol=0)
    in_bfloat16 = logits_by_chunks(make_runner(tmp_path / "model"), ids, list(range(1, 8)), [100])[0]
    assert not torch.equal(in_bfloat16.float(), in_float32)
    assert torch.allclose(in_bfloat16.float(), expected, atol=0.15, rtol=0.05)


def greedy(runner: Any, prompt: list[int], pages: list[int], count: int) -> list[int]:
    def draw(plan: RunnableStep) -> int:
        return runner.run(plan).token_ids[0]

    output = [draw(step(Row(0, prompt, pages, prompt=len(prompt))))]
    while len(output) < count:
        output.append(draw(step(Row(len(prompt) + len(output) - 1, output[-1:], pages, prompt=len(prompt)))))
    return output


def test_greedy_tokens_are_those_of_generate(tmp_path: Path) -> None:
    kind, options = CASES["qwen3-gqa2-head-dim-apart"]
    reference = save_model(tmp_path / "model", kind, **options)
    runner = make_runner(tmp_path / "model")
    prompt = [5, 9, 200, 31, 77]
    with torch.no_grad():
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert greedy(runner, prompt, list(range(1, 5)), 40) == expected[0, len(prompt) :].tolist()
