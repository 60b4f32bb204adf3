"""Encoders in folders: which config.json is served, what its classes become, and which tensors are whose."""

import json
from pathlib import Path
from typing import Any

import pytest

from nodes.model_spec import ModelDamaged, ModelSpec, ModelUnsupported, resolve_model
from nodes.model_spec.weight_index import expected_shapes
from nodes.models.pooling import Dense, Pooling
from tests.nodes.checkpoints import fake_spec, write_model, write_safetensors

BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 64,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "position_embedding_type": "absolute",
}  # fmt: skip
ROBERTA = BERT | {
    "architectures": ["RobertaModel"], "model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1
}  # fmt: skip
CLASSES = {"architectures": ["BertForSequenceClassification"]}
IDENTITY = "torch.nn.modules.linear.Identity"


def test_an_encoder_makes_vectors_of_whole_sequences() -> None:
    spec = fake_spec(BERT)
    assert (spec.is_encoder, spec.context_length, spec.head_dim, spec.num_kv_heads) == (True, 64, 4, 4)
    assert spec.pooling is None
    assert fake_spec(ROBERTA).context_length == 64
    assert fake_spec(ROBERTA).first_position == 2
    # As transformers fills in what is missing.
    assert fake_spec({key: BERT[key] for key in list(BERT)[:7]}).context_length == 512


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("position_embedding_type", "rotary"),
        ("hidden_act", "mish"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_nothing_computes_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ModelUnsupported, match=field):
        fake_spec(BERT | {field: value})


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"num_attention_heads": 5}, "hidden_size is not a multiple of num_attention_heads"),
        ({"max_position_embeddings": 2}, "max_position_embeddings is 2, of which the first 2 are not used"),
        ({"type_vocab_size": 0}, "type_vocab_size"),
        ({"architectures": ["RobertaForSequenceClassification"], "id2label": {"1": "a"}}, "id2label"),
        ({"architectures": ["RobertaForSequenceClassification"], "id2label": {}}, "id2label"),
    ],
)
def test_what_contradicts_itself_is_damaged(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelDamaged, match=key):
        fake_spec(ROBERTA | fields)


def test_classes_are_told_by_the_first_position() -> None:
    pooling = fake_spec(BERT | CLASSES | {"id2label": {"0": "no", "1": "yes"}}).pooling
    dense = (
        Dense(16, 16, "bert.pooler.dense.weight", "bert.pooler.dense.bias", "tanh"),
        Dense(16, 2, "classifier.weight", "classifier.bias"),
    )
    assert pooling == Pooling(pool="cls", kind="classify", dense=dense, labels=("no", "yes"), activation="softmax")
    score = fake_spec(BERT | CLASSES | {"num_labels": 1, "sbert_ce_default_activation_function": IDENTITY}).pooling
    assert score is not None
    assert (score.kind, score.activation, score.num_dimensions(16)) == ("score", "identity", 1)


def test_an_activation_of_scores_that_is_not_known_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match=r"sbert_ce_default_activation_function is 'my\.own\.Activation'"):
        fake_spec(BERT | CLASSES | {"sbert_ce_default_activation_function": "my.own.Activation"})


def stored(directory: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> ModelSpec:
    write_model(directory, config)
    write_safetensors(directory / "model.safetensors", tensors)
    return resolve_model(str(directory))


def test_names_of_tensors(tmp_path: Path) -> None:
    """With or without the body's name, with heads that are left out, by TensorFlow's names of norms."""
    shapes = expected_shapes(fake_spec(BERT))
    bare = {name.removeprefix("bert."): shape for name, shape in shapes.items()}
    pooler = {"pooler.dense.weight": (16, 16), "pooler.dense.bias": (16,)}
    masked = {"cls.predictions.bias": (300,), "cls.predictions.transform.dense.weight": (16, 16)}
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): shape
        for name, shape in shapes.items()
    }
    assert older != shapes
    for tensors in (
        shapes,
        bare | pooler | {"embeddings.position_ids": (1, 64)},
        shapes | masked | {f"bert.{name}": shape for name, shape in pooler.items()},
        older,
    ):
        spec = stored(tmp_path / "m", BERT, tensors)
        assert not spec.has_head
        assert spec.layer_windows == (0, 0)
    with pytest.raises(ModelDamaged, match=r"does not ask for: 'classifier\.weight'"):
        stored(tmp_path / "m", BERT, shapes | {"classifier.weight": (2, 16)})
    del bare["encoder.layer.1.output.LayerNorm.bias"]
    with pytest.raises(ModelDamaged, match=r"no tensor 'encoder\.layer\.1\.output\.LayerNorm\.bias'"):
        stored(tmp_path / "m", BERT, bare)


@pytest.mark.parametrize(
    ("config", "head"),
    [
        (BERT | CLASSES, "classifier"),
        (ROBERTA | {"architectures": ["RobertaForSequenceClassification"]}, "classifier.out_proj"),
    ],
)
def test_a_head_of_classes_is_checked_as_the_rest_is(tmp_path: Path, config: dict[str, Any], head: str) -> None:
    shapes = expected_shapes(fake_spec(config))
    assert shapes[f"{head}.weight"] == (2, 16)
    assert stored(tmp_path / "m", config, shapes).pooling == fake_spec(config).pooling
    with pytest.raises(ModelDamaged, match=rf"'{head}\.weight' has shape \[3, 16\]"):
        stored(tmp_path / "m", config, shapes | {f"{head}.weight": (3, 16)})
    with pytest.raises(ModelDamaged, match=f"no tensor '{head}.bias'"):
        stored(tmp_path / "m", config, {name: shape for name, shape in shapes.items() if name != f"{head}.bias"})


def test_heads_of_other_tasks_are_not_served(tmp_path: Path) -> None:
    write_model(tmp_path, BERT)
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"architectures": ["BertForTokenClassification"]}))
    with pytest.raises(ModelUnsupported, match="BertForTokenClassification"):
        resolve_model(str(tmp_path))
