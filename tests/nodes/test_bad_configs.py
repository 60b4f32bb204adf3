"""A config.json in which any value is any JSON value is a model or a typed error, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.model_spec import ModelDamaged, ModelError, ModelSpec, resolve_model
from tests.nodes.checkpoints import SHAPE, write_model
from tests.nodes.test_model_spec import SLIDES

YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
IDS = {"bos_token_id": 1, "eos_token_id": [2, 3], "dtype": "float32", "hidden_act": "silu", "rope_theta": 1e4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": YARN | {"original_max_position_embeddings": 64}, "attention_bias": False},
    "mistral": {"sliding_window": 40, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
    "qwen2": SLIDES | {"layer_types": ["sliding_attention", "full_attention"], "rope_scaling": DYNAMIC},
    "qwen3": {"head_dim": 4, "rope_scaling": LONGROPE | {"original_max_position_embeddings": 64}},
    "olmo2": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [0], "norm_topk_prob": True,
    },
    "bert": {
        "layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False, "add_cross_attention": False,
        "position_embedding_type": "absolute", "hidden_act": "gelu", "id2label": {"0": "no", "1": "yes"},
    },
    "xlm-roberta": {
        "architectures": ["XLMRobertaForSequenceClassification"], "pad_token_id": 1, "num_labels": 1,
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    },
    "gemma3_text": {
        "head_dim": 4, "query_pre_attn_scalar": 16, "sliding_window": 40, "sliding_window_pattern": 2,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
}  # fmt: skip
NUMBERS = [-1, 0, 1, 2, 3, 300, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e300, -1e300, 5e-324]
WORDS = ["", "yarn", "default", "full_attention", "sliding_attention", "float16", "\ud800", "NaN"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*NUMBERS, *WORDS])
KEYS = st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "x"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where a document has values, those of objects and lists included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def replaced(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """The document with another value in one place."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = replaced(document[path[0]], path[1:], value)
    return copy


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    made: dict[str, tuple[Path, dict[str, Any]]] = {}
    for kind, own in CONFIGS.items():
        config = SHAPE | IDS | {"model_type": kind, "architectures": None} | own
        made[kind] = write_model(tmp_path_factory.mktemp(kind), config), config
    for kind, text in (("gemma3", "gemma3_text"), ("mistral3", "mistral")):
        directory, config = write_model(tmp_path_factory.mktemp(kind), made[text][1]), made[text][1]
        made[kind] = directory, IDS | {"model_type": kind, "architectures": None, "text_config": config}
    return made


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_place(checkpoints: dict[str, tuple[Path, dict[str, Any]]], data: st.DataObject) -> None:
    directory, config = checkpoints[data.draw(st.sampled_from(list(checkpoints)))]
    for _ in range(data.draw(st.integers(1, 2))):
        added = [*places(config)[1:], *((key,) for key in ("rope_parameters", "layer_types", "quantization_config"))]
        path = data.draw(st.sampled_from(added))
        config = replaced({path[0]: None} | config if len(path) == 1 else config, path, data.draw(VALUES))
    (directory / "config.json").write_text(json.dumps(config))
    try:
        spec = resolve_model(str(directory))
    except ModelError:
        return
    assert isinstance(spec, ModelSpec)
    assert spec.within(2**40).context_length == spec.max_context_length
    assert spec.kv_layout().page_bytes > 0


@pytest.mark.parametrize(
    "value", ["1e400", "-1e400", "NaN", "9" * 5000, "9" * 400, "[" * 5000 + "]" * 5000, '"\\ud800"']
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_numbers_that_python_reads_but_nobody_means(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], file: str, value: str
) -> None:
    directory, config = checkpoints["llama"]
    (directory / "config.json").write_text(json.dumps(config))
    keys = ("hidden_size", "rms_norm_eps", "rope_theta") if file == "config.json" else ("temperature", "typical_p")
    try:
        for key in keys:
            (directory / file).write_text(json.dumps(config | {key: "@"}).replace('"@"', value))
            with pytest.raises(ModelDamaged):
                resolve_model(str(directory))
    finally:
        (directory / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10_000}, {"num_experts": 2**31 - 1}])
def test_more_layers_than_fit_into_memory_are_not_listed(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], change: dict[str, int]
) -> None:
    directory, config = checkpoints["qwen3_moe"]
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelDamaged, match=r"has \d+ tensors, but its config.json asks for"):
        resolve_model(str(directory))
