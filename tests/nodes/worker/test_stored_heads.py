"""A head or an embedding that is stored alone, or both though config.json ties them: computed as transformers does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nodes.model_spec import resolve_model
from nodes.worker.pool.device_memory import parameter_bytes
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.test_parity import PLAIN, assert_agrees, assert_two_ranks_agree, save_model
from tests.nodes.worker.torch_running import logits_by_chunks, make_runner

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def saved(directory: Path, *, leaves_out: str = "", kind: str = "llama", tied: bool = True) -> torch.nn.Module:
    """A model with both tensors, less what is left out, and the flag; as transformers reads the folder."""
    save_model(directory, kind, heads=(4, 2), hidden=64, rope=PLAIN, tied=False, head_dim=16)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(leaves_out, None)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@pytest.mark.parametrize("leaves_out", ["", EMBEDDING, HEAD])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_all_that_compute_take_the_head_that_transformers_takes(tmp_path: Path, kind: str, leaves_out: str) -> None:
    reference = saved(tmp_path, leaves_out=leaves_out, kind=kind)
    makers: tuple[Callable[[Path], object], ...] = (make_runner, device_runner)
    for make in makers:
        assert_agrees(make(tmp_path), reference)
    assert_two_ranks_agree(tmp_path, reference)


@pytest.mark.parametrize("leaves_out", ["", EMBEDDING, HEAD])
def test_names_without_a_prefix(tmp_path: Path, leaves_out: str) -> None:
    saved(tmp_path, leaves_out=leaves_out)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_agrees(make_runner(tmp_path), reference)
    assert_two_ranks_agree(tmp_path, reference)


def test_int8_rounds_the_head_that_is_used(tmp_path: Path) -> None:
    """A tied embedding is rounded once for both; a head of its own is rounded by itself."""
    ids, logits = list(range(90, 10, -1)), {}
    for name, tied, leaves_out in (("flag", True, ""), ("plain", False, ""), ("head", True, EMBEDDING)):
        saved(tmp_path / name, leaves_out=leaves_out, tied=tied)
        for kernels in ("auto", "torch"):
            runner = make_runner(tmp_path / name, quantize="int8", kernels=kernels)
            logits[name, kernels] = logits_by_chunks(runner, ids, list(range(1, 6)), [80])[0]
    assert torch.equal(logits["flag", "auto"], logits["plain", "auto"])
    assert not torch.equal(logits["head", "auto"], logits["flag", "auto"])
    for name in ("flag", "head"):
        assert torch.allclose(logits[name, "auto"], logits[name, "torch"], atol=1e-3)


def test_memory_is_planned_for_a_head_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "both")
    saved(tmp_path / "one", leaves_out=HEAD)
    both, one = (parameter_bytes(resolve_model(str(tmp_path / name)), "float32") for name in ("both", "one"))
    assert both - one == 300 * 64 * 4
