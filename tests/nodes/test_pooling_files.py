"""What the folder of a model says of vectors: pooling, products behind it, prompts, heads; and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import ModelDamaged, ModelError, ModelNotFound, ModelUnsupported, resolve_model
from nodes.model_spec.checkpoint_files import small_files
from nodes.model_spec.weight_index import expected_shapes
from nodes.models.pooling import Dense, Pooling
from tests.nodes.checkpoints import LLAMA, fake_spec, write_model, write_modules, write_safetensors

MODES = {"cls_token": "cls", "max_tokens": "", "mean_tokens": "mean", "weightedmean_tokens": "", "lasttoken": "last"}
NAMES = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "weightedmean_tokens": "weightedmean",
         "lasttoken": "lasttoken"}  # fmt: skip
MEAN = ("Pooling", {"word_embedding_dimension": 16, "pooling_mode": "mean"})
UNTIED = LLAMA | {"tie_word_embeddings": False}


def pooling_of(directory: Path) -> Pooling:
    found = resolve_model(str(directory)).pooling
    assert found is not None
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), LLAMA)


@given(active=st.sets(st.sampled_from(sorted(MODES))), spelling=st.sampled_from(["flags", "text", "list", "both"]))
def test_one_mode_is_read_in_both_spellings_and_several_are_refused(plain, active, spelling) -> None:
    names = [NAMES[flag] for flag in sorted(active)]
    flags = {f"pooling_mode_{flag}": flag in active for flag in MODES}
    config = {"embedding_dimension": 16, "include_prompt": True} | (flags if spelling == "flags" else {})
    if spelling in ("text", "list") and names:
        config["pooling_mode"] = names[0] if spelling == "text" else names
    if spelling == "both":
        # What is spelled out goes first, as in sentence-transformers.
        config |= {"pooling_mode_max_tokens": True, "pooling_mode": names or ["mean"]}
    write_modules(plain, ("Pooling", config))
    wanted = sorted(active)[:1] if spelling == "text" else sorted(active)
    if not wanted:
        assert pooling_of(plain) == Pooling(pool="mean")
    elif len(wanted) == 1 and MODES[wanted[0]]:
        assert pooling_of(plain) == Pooling(pool=MODES[wanted[0]])
    else:
        with pytest.raises(ModelUnsupported, match="several at once" if len(wanted) > 1 else "supported are lasttoken"):
            pooling_of(plain)


def test_products_prompts_and_limits(tmp_path: Path) -> None:
    write_modules(
        write_model(tmp_path, LLAMA), MEAN,
        ("Dense", {"in_features": 16, "out_features": 8, "activation_function": "torch.nn.modules.linear.Identity"}),
        ("Dense", {"in_features": 8, "out_features": 24, "bias": False}), "Normalize",
        config_sentence_transformers__json={"prompts": {"query": "q: ", "other": None}, "default_prompt_name": "query"},
        sentence_bert_config__json={"max_seq_length": 128, "do_lower_case": False},
        tokenizer_config__json={"model_max_length": 256},
    )  # fmt: skip
    spec = resolve_model(str(tmp_path))
    first, second = (str(tmp_path / f"{number}_Dense" / "model.safetensors") for number in (2, 3))
    assert spec.pooling == Pooling(
        pool="mean", normalize=True, prompts={"query": "q: ", "other": ""}, default_prompt="query", max_length=128,
        dense=(Dense(16, 8, "linear.weight", "linear.bias", path=first),
               Dense(8, 24, "linear.weight", "", "tanh", path=second)),
    )  # fmt: skip
    assert spec.pooling.num_dimensions(spec.hidden_size) == 24
    assert not set(expected_shapes(spec)) - set(expected_shapes(replace(spec, pooling=None)))
    write_safetensors(Path(second), {"linear.weight": (24, 8)}, fill=1)
    assert resolve_model(str(tmp_path)).fingerprint != spec.fingerprint, "other vectors"
    (tmp_path / "sentence_bert_config.json").unlink()
    assert pooling_of(tmp_path).max_length == 256
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert pooling_of(tmp_path).max_length == 0


DENSE = {"in_features": 16, "out_features": 8}
CROSS = {"config_sentence_transformers__json": {"model_type": "CrossEncoder"}}


@pytest.mark.parametrize(
    ("modules", "others", "kind", "words"),
    [
        ((), {}, ModelUnsupported, "is 'feature-extraction', not sequence-classification"),
        ((), {"sentence_bert_config__json": {"transformer_task": "sequence-classification"}}, ModelUnsupported,
         "model_type is None"),
        ((), CROSS | {"sentence_bert_config__json": {"transformer_task": "sequence-classification"}}, ModelUnsupported,
         "Transformer alone, though its architecture has no head"),
        ((MEAN, "WordWeights"), {}, ModelUnsupported, "names Pooling, WordWeights after the Transformer"),
        ((MEAN, "Normalize", ("Dense", DENSE)), {}, ModelUnsupported, "Pooling, Normalize, Dense"),
        (("CNN", MEAN), {}, ModelUnsupported, "Transformer, CNN, Pooling in this order"),
        ((("Pooling", {"word_embedding_dimension": 32}),), {}, ModelDamaged, "is 32, but what comes before has 16"),
        ((("Pooling", {}),), {}, ModelDamaged, "embedding_dimension should be a positive integer"),
        ((MEAN, ("Dense", {"in_features": 24, "out_features": 8})), {}, ModelDamaged, "in_features is 24"),
        ((MEAN, ("Dense", DENSE | {"activation_function": "torch.nn.modules.activation.Mish"})), {}, ModelUnsupported,
         "Mish'; supported are Identity, Tanh, ReLU, GELU, Sigmoid of torch"),
        ((MEAN, ("Dense", DENSE | {"activation_function": "os.Tanh"})), {}, ModelUnsupported, "'os.Tanh'"),
        ((MEAN, ("Dense", DENSE | {"use_residual": True})), {}, ModelUnsupported, "use_residual is True"),
        ((MEAN, ("Dense", DENSE | {"module_input_name": "x"})), {}, ModelUnsupported, "name is 'x'"),
        ((MEAN, ("Dense", DENSE | {"module_output_name": "scores"})), {}, ModelUnsupported, "scores"),
        ((MEAN,), {"config_sentence_transformers__json": {"model_type": "SparseEncoder"}}, ModelUnsupported, "Sparse"),
        ((MEAN,), {"config_sentence_transformers__json": {"truncate_dim": 8}}, ModelUnsupported, "truncate_dim is 8"),
        ((MEAN,), {"config_sentence_transformers__json": {"prompts": {"a": 1}}}, ModelDamaged, "prompts has 1 as a"),
        ((MEAN,), {"config_sentence_transformers__json": {"default_prompt_name": "a"}}, ModelDamaged, "'a', which"),
        ((MEAN,), {"sentence_bert_config__json": {"do_lower_case": True}}, ModelUnsupported, "first in its normalizer"),
        ((MEAN,), {"sentence_bert_config__json": {"max_seq_length": -1}}, ModelDamaged, "max_seq_length"),
        ((MEAN,), {"sentence_bert_config__json": {"query_length": 32}}, ModelUnsupported, "query_length is 32"),
        ((MEAN,), {"sentence_bert_config__json": {"config_args": {"is_causal": False}}}, ModelUnsupported, "is_causal"),
        ((MEAN,), {"sentence_bert_config__json": {"processing_kwargs": {"text": {}}}}, ModelUnsupported, "for text"),
        ((MEAN,), {"sentence_bert_config__json": {"modality_config": {"text": {"method": "x"}}}}, ModelUnsupported,
         "modality_config asks for"),
        ((("Pooling", MEAN[1] | {"include_prompt": False}),),
         {"config_sentence_transformers__json": {"prompts": {"a": "b"}}}, ModelUnsupported, "though there are prompts"),
        ((("LogitScore", {"true_token_id": 300}),),
         CROSS | {"sentence_bert_config__json": {"transformer_task": "text-generation"}}, ModelDamaged, "up to 299"),
    ],
)  # fmt: skip
def test_what_asks_for_something_else_is_refused(tmp_path, modules, others, kind, words) -> None:
    with pytest.raises(kind, match=words):
        resolve_model(str(write_modules(write_model(tmp_path, LLAMA), *modules, **others)))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"type": "custom_st.Pooling"}, ModelUnsupported, "no module of sentence-transformers"),
        ({"path": "../1_Pooling"}, ModelUnsupported, "not a folder"),
        ({"path": "."}, ModelUnsupported, "not a folder"),
        ({"path": ""}, ModelUnsupported, "not a folder"),
        ({"path": "gone"}, ModelNotFound, "gone/config.json is missing"),
        ({"kwargs": ["task"]}, ModelUnsupported, "asks for"),
    ],
)
def test_modules_of_other_kinds_and_places_are_refused(tmp_path, change, kind, words) -> None:
    directory = write_modules(write_model(tmp_path, LLAMA), MEAN)
    first, pooling = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([first, pooling | change]))
    with pytest.raises(kind, match=words):
        resolve_model(str(directory))


def test_texts_in_lower_case_are_the_tokenizers_work(tmp_path: Path) -> None:
    directory = write_modules(write_model(tmp_path, LLAMA), MEAN, sentence_bert_config__json={"do_lower_case": True})
    tokenizer = json.loads(byte_tokenizer_json(300))
    for normalizer in (
        {"type": "Lowercase"},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    ):
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": normalizer}))
        assert pooling_of(directory).pool == "mean"


@pytest.mark.parametrize(
    ("shapes", "kind", "words"),
    [
        ({"linear.weight": (8, 15), "linear.bias": (8,)}, ModelDamaged, r"shape \[8, 15\], but 2_Dense/config.json"),
        ({"linear.weight": (8, 16)}, ModelDamaged, "has the tensors linear.weight, but"),
        ({"linear.weight": (8, 16), "linear.bias": (8,), "residual.weight": (8, 16)}, ModelDamaged, "residual"),
        (None, ModelNotFound, "2_Dense/model.safetensors is missing"),
        ("bin", ModelUnsupported, "pytorch_model.bin beside it is not read"),
        ("cut", ModelDamaged, "not a complete safetensors file"),
        ("I8", ModelUnsupported, "stored as I8"),
    ],
)
def test_weights_of_a_product_are_checked(tmp_path: Path, shapes, kind, words) -> None:
    directory = write_modules(write_model(tmp_path, LLAMA), MEAN, ("Dense", DENSE))
    file = directory / "2_Dense" / "model.safetensors"
    right = {"linear.weight": (8, 16), "linear.bias": (8,)}
    match shapes:
        case dict():
            write_safetensors(file, shapes)
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "I8":
            write_safetensors(file, right, "I8")
        case _:
            file.unlink()
            if shapes:
                (file.parent / "pytorch_model.bin").touch()
    with pytest.raises(kind, match=words):
        resolve_model(str(directory))


def classifier(**fields: object) -> dict:
    return LLAMA | {"architectures": ["LlamaForSequenceClassification"]} | fields


@pytest.mark.parametrize(
    ("fields", "kind", "labels", "activation"),
    [
        ({}, "classify", ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, "score", ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "b", "0": "a", "2": "c"}}, "classify", ("a", "b", "c"), "softmax"),
        ({"problem_type": "multi_label_classification"}, "classify", ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "score", ("LABEL_0",), "identity"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "score",
         ("LABEL_0",), "identity"),
        ({"num_labels": 1, "problem_type": "regression", "sentence_transformers":
          {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "score", ("LABEL_0",), "sigmoid"),
    ],
)  # fmt: skip
def test_a_head_of_classes(tmp_path: Path, fields, kind, labels, activation) -> None:
    spec = resolve_model(str(write_model(tmp_path, classifier(**fields))))
    assert not spec.has_head
    assert spec.pooling == Pooling(
        pool="last", kind=kind, labels=labels, activation=activation, dense=(Dense(16, len(labels), "score.weight"),)
    )
    assert expected_shapes(spec)["score.weight"] == (len(labels), 16)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id2label": {"1": "a"}}, "by the numbers from 0 on"),
        ({"id2label": {"0": 1}}, "by the numbers from 0 on"),
        ({"num_labels": 10**9}, "num_labels"),
        ({"problem_type": "other"}, "problem_type is 'other'"),
        ({"sbert_ce_default_activation_function": "x.Sigmoid"}, "'x.Sigmoid'"),
    ],
)
def test_heads_that_are_not_understood_are_refused(tmp_path: Path, fields, words) -> None:
    directory = write_model(tmp_path, classifier())
    (directory / "config.json").write_text(json.dumps(classifier(**fields)))
    with pytest.raises(ModelError, match=words):
        resolve_model(str(directory))


def test_a_head_of_classes_that_its_config_does_not_fit_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path, classifier(num_labels=3))
    (directory / "config.json").write_text(json.dumps(classifier()))
    with pytest.raises(ModelDamaged, match=r"'score.weight' has shape \[3, 16\]"):
        resolve_model(str(directory))
    (directory / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelDamaged, match=r"does not ask for: 'score.weight'"):
        resolve_model(str(directory))


def test_a_head_that_rewards(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"}
    spec = resolve_model(str(write_model(tmp_path, config)))
    assert (spec.pooling.kind, spec.pooling.activation, spec.has_head) == ("score", "identity", False)
    assert [dense.activation for dense in spec.pooling.dense] == ["relu", "identity"]
    shapes = {name: shape for name, shape in expected_shapes(spec).items() if name.startswith("score")}
    assert shapes == {
        "score.0.weight": (16, 16),
        "score.0.bias": (16,),
        "score.2.weight": (1, 16),
        "score.2.bias": (1,),
    }


def test_a_network_that_was_saved_without_its_head_makes_vectors_only(tmp_path: Path) -> None:
    """As larger ones of Qwen3-Embedding, whose embeddings are not tied, and e5-mistral, called MistralModel."""
    shapes = expected_shapes(resolve_model(str(write_model(tmp_path / "tied", LLAMA))))
    for config in (UNTIED, UNTIED | {"architectures": ["LlamaModel"]}):
        directory = write_modules(write_model(tmp_path / "m", config), MEAN)
        stored = {name.removeprefix("model."): shape for name, shape in shapes.items()}
        write_safetensors(directory / "model.safetensors", stored)
        spec = resolve_model(str(directory))
        assert (spec.has_head, spec.tie_word_embeddings, spec.notes) == (False, True, ())
        write_safetensors(directory / "model.safetensors", stored | {"lm_head.weight": (300, 16)})
        spec = resolve_model(str(directory))
        assert (spec.has_head, spec.tie_word_embeddings, spec.notes) == (True, False, ())


def test_a_choice_goes_before_what_the_folder_says(tmp_path: Path) -> None:
    assert resolve_model("tiny", "cls,normalize").pooling == Pooling(pool="cls", normalize=True)
    assert resolve_model("echo", "last").pooling == Pooling(pool="last")
    assert resolve_model("random:tiny-llama", "mean").pooling == Pooling(pool="mean")
    prompts = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    directory = str(
        write_modules(
            write_model(tmp_path / "m", LLAMA), MEAN, ("Dense", DENSE), "Normalize",
            config_sentence_transformers__json=prompts, sentence_bert_config__json={"max_seq_length": 128},
        )
    )  # fmt: skip
    own = resolve_model(directory)
    for choice, change in (("last", {"pool": "last", "normalize": False}), ("mean,normalize", {}), ("auto", {})):
        assert resolve_model(directory, choice) == replace(own, pooling=replace(own.pooling, **change))
    head = str(write_model(tmp_path / "head", classifier()))
    assert resolve_model(head, "mean").pooling == Pooling(pool="mean")


def test_scores_by_two_words(tmp_path: Path) -> None:
    directory = write_modules(
        write_model(tmp_path, LLAMA), ("LogitScore", {"true_token_id": 7}),
        config_sentence_transformers__json={"model_type": "CrossEncoder", "prompts": {"a": "b"}},
        sentence_bert_config__json={"transformer_task": "text-generation"},
    )  # fmt: skip
    embedding = "model.embed_tokens.weight"
    assert pooling_of(directory) == Pooling(
        pool="last", kind="score", activation="sigmoid", prompts={"a": "b"}, dense=(Dense(16, 1, embedding, rows=(7,)),)
    )
    with pytest.raises(ModelUnsupported, match="no token 'no'"):
        resolve_model(str(directory), "yes_no")
    tokenizer = json.loads(byte_tokenizer_json(300))
    tokenizer["model"]["vocab"] |= {"no": 290, "yes": 291}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    for tied, name in ((True, embedding), (False, "lm_head.weight")):
        config = LLAMA | {"tie_word_embeddings": tied}
        (directory / "config.json").write_text(json.dumps(config))
        write_safetensors(directory / "model.safetensors", expected_shapes(fake_spec(config)))
        spec = resolve_model(str(directory), "yes_no")
        assert (spec.pooling.kind, spec.pooling.dense) == ("yes_no", (Dense(16, 2, name, rows=(290, 291)),))
        assert name in expected_shapes(spec)
    headless = write_model(tmp_path / "headless", LLAMA | {"architectures": ["LlamaModel"]})
    with pytest.raises(ModelUnsupported, match="has no head"):
        resolve_model(str(headless), "yes_no")


def test_files_of_modules_are_fetched(plain: Path) -> None:
    wanted = ["modules.json", "1_Pooling/config.json", "2_Dense/config.json", "sentence_bert_config.json"]
    others = ["2_Dense/model.safetensors", "onnx/config.json", "1_Pooling/other.json", "x/1_Pooling/config.json"]
    assert small_files(wanted + others) == wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = {
    "modules.json": ["type", "path", "kwargs"],
    "1_Pooling/config.json": ["embedding_dimension", "pooling_mode", "pooling_mode_mean_tokens", "include_prompt"],
    "2_Dense/config.json": ["in_features", "out_features", "bias", "activation_function", "use_residual"],
    "3_Normalize/config.json": ["module_input_name"],
    "config_sentence_transformers.json": ["prompts", "default_prompt_name", "model_type", "truncate_dim"],
    "sentence_bert_config.json": ["max_seq_length", "do_lower_case", "transformer_task", "modality_config",
                                  "processing_kwargs", "model_args", "query_length"],
    "tokenizer_config.json": ["model_max_length"],
    "config.json": ["id2label", "num_labels", "problem_type", "sentence_transformers", "is_causal"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One with modules, and one with a head of classes."""
    directory, head = write_model(tmp_path_factory.mktemp("embedder"), LLAMA), tmp_path_factory.mktemp("classifier")
    write_modules(
        directory, MEAN, ("Dense", DENSE), "Normalize",
        config_sentence_transformers__json={}, sentence_bert_config__json={}, tokenizer_config__json={},
    )  # fmt: skip
    return directory, write_model(head, classifier())


@given(at=st.sampled_from([(name, field) for name, fields in FIELDS.items() for field in fields]), value=JSON)
def test_a_field_of_any_value_is_read_or_refused_by_name(folders, at: tuple[str, str], value: object) -> None:
    directory = folders[at[0] == "config.json"]
    assert resolve_model(str(directory)).pooling
    file, refused = directory / at[0], str(directory)
    before = file.read_text()
    document = json.loads(before)
    (document[1] if isinstance(document, list) else document)[at[1]] = value
    try:
        file.write_text(json.dumps(document))
        resolve_model(str(directory))
    except ModelError as error:
        refused = error.message
    finally:
        file.write_text(before)
    assert str(directory) in refused
