"""Gemma 3 agrees with transformers, alone and in two ranks, as transformers 5 writes it and as published files are."""

import json
from pathlib import Path
from typing import Any

import pytest

from nodes.model_spec import ModelUnsupported, resolve_model
from tests.nodes.worker.test_parity import assert_agrees, assert_all_agree, assert_two_ranks_agree, save_model
from tests.nodes.worker.torch_running import make_runner

ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OPTIONS: dict[str, Any] = {
    "heads": (4, 2), "hidden": 48, "rope": ROPES, "head_dim": 256, "sliding_window": 37, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 100,
}  # fmt: skip


def test_gemma3(tmp_path: Path) -> None:
    reference = save_model(tmp_path, "gemma3_text", **OPTIONS)
    assert "/varies/" not in make_runner(tmp_path).numerics
    assert_all_agree(tmp_path, reference)
    assert_two_ranks_agree(tmp_path, reference)


def test_what_published_files_say_is_the_same_model(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3_text", **OPTIONS)
    expected = resolve_model(str(tmp_path))
    assert expected.layer_windows == (37, 0, 37, 0)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings"):
        del config[key]
    config |= {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    path.write_text(json.dumps(config))
    assert resolve_model(str(tmp_path)) == expected
    path.write_text(json.dumps(config | {"attn_logit_softcapping": 50.0}))
    with pytest.raises(ModelUnsupported, match=r"attn_logit_softcapping is 50\.0"):
        resolve_model(str(tmp_path))


def test_a_window_as_wide_as_the_context_keeps_its_rotation(tmp_path: Path) -> None:
    reference = save_model(tmp_path, "gemma3_text", **OPTIONS | {"sliding_window": 4096, "head_dim": 16})
    assert_agrees(make_runner(tmp_path), reference)
