"""How long a context may be requested: what config.json says, or what a scaled rotary embedding was made for."""

from pathlib import Path

import msgspec
import pytest

from nodes.model_spec import ModelSpec, resolve_model
from tests.nodes.checkpoints import LLAMA, write_model
from tests.nodes.test_model_spec import MISTRAL

SHORT = LLAMA | {"max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
GEMMA = SHORT | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 4}


@pytest.mark.parametrize(
    ("rope", "most", "reason"),
    [
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}, 256, "YaRN: 64 × 4"),
        ({"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 40}, 100, "YaRN: 40 × 2.5"),
        # Without it, as in transformers, the one that config.json has; a null factor is the ratio of the two.
        ({"rope_type": "yarn", "factor": 4}, 256, "YaRN: 64 × 4"),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}, 64, ""),
        # Scaled already.
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}, 64, ""),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 16}, 64, ""),
        ({"rope_type": "linear", "factor": 3}, 192, "linear RoPE: 64 × 3"),
        ({"rope_type": "dynamic", "factor": 1.5}, 96, "dynamic RoPE: 64 × 1.5"),
        ({"rope_type": "linear", "factor": 1e300}, 2**31 - 1, "linear RoPE: 64 × 1e+300"),
        ({"rope_type": "linear", "factor": 0.5}, 64, ""),
        (LLAMA3 | {"original_max_position_embeddings": 32}, 64, ""),
        (LONGROPE | {"original_max_position_embeddings": 32}, 64, ""),
        (None, 64, ""),
    ],
)
def test_the_most_that_may_be_requested(tmp_path: Path, rope: dict | None, most: int, reason: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        spec = resolve_model(str(write_model(tmp_path / key, SHORT | {key: rope})))
        assert (spec.context_length, spec.max_context_length, spec.max_context_reason) == (64, most, reason)
        assert [spec.within(n).context_length for n in (0, 10, 64)] == [64, 64, 64]
        assert spec.within(most).context_length == spec.within(most + 1).context_length == most


def test_gemma_says_the_scaled_one(tmp_path: Path) -> None:
    config = GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert resolve_model(str(write_model(tmp_path, config))).max_context_length == 64


def test_an_original_context_beside_wins(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    config = SHORT | {"rope_scaling": rope, "original_max_position_embeddings": 32}
    assert resolve_model(str(write_model(tmp_path, config))).max_context_length == 128


def dynamic(directory: Path, **others: object) -> ModelSpec:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    return resolve_model(str(write_model(directory, SHORT | {"rope_parameters": rope} | others)))


def test_only_a_request_beyond_the_original_context_changes_dynamic_frequencies(tmp_path: Path) -> None:
    spec = dynamic(tmp_path)
    assert spec.within(0) == spec.within(64) == spec
    assert spec.rope.theta == 100.0
    longer = spec.within(65)
    # Heads of 4: (4 * 4 - 3) ** (4 / 2).
    assert longer.rope.theta == pytest.approx(100.0 * 13**2)
    assert longer.within(65) == longer
    assert longer.within(256) == spec.within(256) == msgspec.structs.replace(longer, context_length=256)
    # Keys that were rotated otherwise must never be taken for this model's.
    prints = [one.quantized(how).fingerprint for one in (spec, longer) for how in ("none", "int8")]
    assert len(set(prints)) == 4


def test_other_kinds_rotate_alike_at_any_length(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    spec = resolve_model(str(write_model(tmp_path, SHORT | {"rope_scaling": rope})))
    assert spec.within(256) == msgspec.structs.replace(spec, context_length=256)


def test_a_window_that_a_longer_context_needs_is_kept(tmp_path: Path) -> None:
    config = MISTRAL | {"max_position_embeddings": 64, "sliding_window": 100}
    assert resolve_model(str(write_model(tmp_path / "a", config))).layer_windows == (0, 0)
    config |= {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert resolve_model(str(write_model(tmp_path / "b", config))).layer_windows == (100, 100)


def test_every_preset_says_its_most() -> None:
    for name in ("echo", "tiny", "random:tiny-llama"):
        spec = resolve_model(name)
        assert spec.max_context_length == spec.context_length
