"""Contexts beyond the one that config.json says, as scaled rotary embeddings allow: what engines compute there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nodes.model_spec import resolve_model
from nodes.worker.ops.torch.kernels import cos_sin_table
from tests.nodes.worker.test_parity import assert_agrees, save_model
from tests.nodes.worker.torch_running import Row, logits_by_chunks, make_runner, step

IDS = [(37 * n) % 300 for n in range(100)]
PAGES = list(range(1, 8))
SHAPE: dict[str, Any] = {"heads": (4, 2), "hidden": 64, "max_position_embeddings": 64}


def reference(directory: Path, rope: dict[str, Any]) -> torch.Tensor:
    """Logits of the last of `IDS` by a saved model's weights with another rotary embedding."""
    model = AutoModelForCausalLM.from_pretrained(directory, rope_parameters=rope, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0, -1]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_yarn_is_served_beyond_what_config_json_says(tmp_path: Path, kernels: str) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    # It agrees on 150 positions; beyond 64, transformers, too, computes as asked.
    model = save_model(tmp_path, "qwen2", rope=rope, **SHAPE)
    assert_agrees(make_runner(tmp_path, kernels=kernels, context_length=256), model)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_dynamic_frequencies_are_plain_within_and_of_the_longest_context_beyond(tmp_path: Path, kernels: str) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = save_model(tmp_path, "llama", rope=rope, **SHAPE)
    with torch.no_grad():
        within = model(torch.tensor([IDS[:64]])).logits[0, -1]
    plain = make_runner(tmp_path, kernels=kernels)
    assert torch.allclose(plain.logits(step(Row(0, IDS[:64], PAGES[:4])))[0], within, atol=1e-4)

    # As vLLM has it for 64 * 4 positions and heads of 16.
    theta = 1e4 * (4.0 * 256 / 64 - 3) ** (16 / 14)
    beyond = reference(tmp_path, {"rope_type": "default", "rope_theta": theta})
    longer = make_runner(tmp_path, kernels=kernels, context_length=100)
    for sizes in ([100], [40, 30, 30]):
        assert torch.allclose(logits_by_chunks(longer, IDS, PAGES, sizes)[-1], beyond, atol=1e-4)


def test_a_devices_table_of_angles_is_as_long_as_what_is_requested(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", rope={"rope_type": "linear", "factor": 4.0}, **SHAPE)
    spec = resolve_model(str(tmp_path)).within(200)
    assert cos_sin_table(spec, spec.rope, torch.device("cpu")).shape == (200, 16)
