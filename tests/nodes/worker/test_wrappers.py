"""The text part of models of text and images: read from its own fields and tensors, computed as transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import ModelDamaged, ModelError, ModelUnsupported, resolve_model
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.test_parity import assert_agrees, assert_two_ranks_agree
from tests.nodes.worker.torch_running import make_runner

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "head_dim": 8,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "head_dim": 16,
    "initializer_range": 0.08, "max_position_embeddings": 512,
}  # fmt: skip
# These leave the numbers of heads out, as the published ones do: 8 and 4, and 32 and 8.
KINDS = {
    "gemma3": TEXT | {"sliding_window": 37, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "mistral3": TEXT | {"sliding_window": None, "rope_theta": 1e6, "model_type": "mistral"},
}
STYLES = {
    "published": (),
    "transformers 4.52": (
        ("language_model.lm_head.", "lm_head."), ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."), ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
}  # fmt: skip


def save_wrapper(directory: Path, kind: str, *, tied: bool, text: dict[str, Any], style: str) -> torch.nn.Module:
    """A model as it was published: `text_config` has what is not a default, and no dtype or flag of its own."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, text_config=dict(text), vision_config=dict(VISION), tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        if not tied:  # transformers starts it with small numbers
            model.lm_head.weight.mul_(4)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"text_config": text}))
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(300))
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        before, after = next((pair for pair in STYLES[style] if name.startswith(pair[0])), ("", ""))
        tensors[after + name.removeprefix(before)] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()


def changed(directory: Path, change: dict[str, Any], text: dict[str, Any] | None = None) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | change
    config["text_config"] = config["text_config"] | (text or {})
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_part_is_served(tmp_path: Path, kind: str, tied: bool, style: str) -> None:
    reference = save_wrapper(tmp_path / "m", kind, tied=tied, text=KINDS[kind], style=style)
    spec = resolve_model(str(tmp_path / "m"))
    assert spec.architecture == {"gemma3": "gemma3_text", "mistral3": "mistral"}[kind]
    assert (spec.num_heads, spec.num_kv_heads) == {"gemma3": (8, 4), "mistral3": (32, 8)}[kind]
    assert spec.tie_word_embeddings == tied
    assert spec.notes == ("m is served without its vision part, which is left out: it takes text only",)
    assert_agrees(make_runner(tmp_path / "m"), reference)
    assert_agrees(device_runner(tmp_path / "m"), reference)
    assert_two_ranks_agree(tmp_path / "m", reference)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma") / "m"
    save_wrapper(directory, "gemma3", tied=True, text=KINDS["gemma3"], style="published")
    return directory


def test_what_the_wrapper_says_itself_wins(gemma: Path) -> None:
    path = gemma / "config.json"
    own = path.read_text()
    spec = resolve_model(str(gemma))
    assert (spec.eos_token_ids, spec.dtype) == ((1,), "float32"), "what transformers takes"
    assert spec.context_length == spec.max_context_length == 512
    changed(gemma, {"dtype": None}, {"eos_token_id": [7, 8], "torch_dtype": "float16"})
    inner = resolve_model(str(gemma))
    assert (inner.eos_token_ids, inner.dtype) == ((7, 8), "float16")
    changed(gemma, {"eos_token_id": 5, "torch_dtype": "bfloat16"})
    outer = resolve_model(str(gemma))
    assert (outer.eos_token_ids, outer.dtype) == ((5,), "bfloat16")
    path.write_text(own)


@pytest.mark.parametrize(
    ("change", "text", "kind", "words"),
    [
        ({"text_config": None}, None, ModelDamaged, "text_config is not an object"),
        ({}, {"model_type": "gemma3n_text"}, ModelUnsupported, "text_config is of model_type 'gemma3n_text'"),
        ({}, {"final_logit_softcapping": 30.0}, ModelUnsupported, "final_logit_softcapping"),
        ({"quantization_config": {"bits": 4}}, None, ModelUnsupported, "quantization_config"),
        ({"tie_word_embeddings": False}, None, ModelDamaged, "no tensor 'lm_head.weight'"),
        ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}, ModelDamaged, "no tensor 'lm_head.weight'"),
        ({"eos_token_id": 300}, None, ModelDamaged, "eos_token_id is 300"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, None, ModelUnsupported, r"Gemma3.* \(text only\)"),
    ],
)
def test_what_is_refused(gemma: Path, change: dict, text: dict | None, kind: type[ModelError], words: str) -> None:
    path = gemma / "config.json"
    own = path.read_text()
    try:
        if "text_config" in change:
            path.write_text(json.dumps(json.loads(own) | change))
        else:
            changed(gemma, change, text)
        with pytest.raises(kind, match=words):
            resolve_model(str(gemma))
    finally:
        path.write_text(own)


def test_a_wrapper_is_told_by_its_type_alone(gemma: Path) -> None:
    path = gemma / "config.json"
    own = path.read_text()
    spec = resolve_model(str(gemma))
    changed(gemma, {"architectures": None})
    assert resolve_model(str(gemma)) == spec
    path.write_text(own)
