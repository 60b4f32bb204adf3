"""Folders that sentence-transformers writes are read as it reads them, and what comes behind the pooling is computed
as it computes it.
"""

import json
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import resolve_model
from nodes.models import pooling as of_spec
from nodes.worker.vectors.head import VectorHead

HIDDEN = 16
POOLS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
FLAGS = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken", "max": "max_tokens"}
ACTIVATIONS = [torch.nn.Identity, torch.nn.Tanh, torch.nn.ReLU, torch.nn.GELU, torch.nn.Sigmoid]


def write_llama(directory: Path, kind: type, **fields: object) -> Path:
    """A small model as transformers saves it, with the byte tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=512, pad_token_id=0, **fields,
    )  # fmt: skip
    kind.from_config(config).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_tokenizer_json(300)))
    tokenizer.add_special_tokens({"pad_token": "<|endoftext|>"})
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return Transformer(str(write_llama(tmp_path_factory.mktemp("base"), AutoModel)))


@st.composite
def dense_layers(draw: st.DrawFn) -> list[Dense]:
    sizes = [HIDDEN, *draw(st.lists(st.integers(1, 24), max_size=2))]
    torch.manual_seed(draw(st.integers(0, 99)))
    return [
        Dense(num_in, num_out, bias=draw(st.booleans()), activation_function=draw(st.sampled_from(ACTIVATIONS))())
        for num_in, num_out in pairwise(sizes)
    ]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(sorted(POOLS)),
    layers=dense_layers(),
    normalizes=st.booleans(),
    prompts=st.dictionaries(st.sampled_from(["query", "document", "x"]), st.text(max_size=5), max_size=2),
    has_default=st.booleans(),
    has_flags=st.booleans(),
    longest=st.none() | st.integers(1, 600),
    is_old_limit=st.booleans(),
)
def test_a_folder_is_read_as_sentence_transformers_reads_it(
    tmp_path_factory, transformer, mode, layers, normalizes, prompts, has_default, has_flags, longest, is_old_limit
) -> None:
    directory = tmp_path_factory.mktemp("folder")
    transformer.tokenizer.model_max_length = longest if longest and not is_old_limit else 512
    modules = [transformer, Pooling(HIDDEN, mode), *layers, *[Normalize()] * normalizes]
    default = next(iter(prompts), None) if has_default else None
    written = SentenceTransformer(modules=modules, device="cpu", prompts=dict(prompts), default_prompt_name=default)
    written.save(str(directory), create_model_card=False)
    if has_flags:
        flags = {f"pooling_mode_{flag}": mode == other for other, flag in FLAGS.items()}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN} | flags))
    if longest and is_old_limit:
        file = directory / "sentence_bert_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_seq_length": longest, "do_lower_case": False}))
    theirs = SentenceTransformer(str(directory), device="cpu")
    spec = resolve_model(str(directory))
    ours = spec.pooling
    assert ours.kind == "embedding"
    assert ours.pool == POOLS[theirs[1].pooling_mode]
    assert ours.num_dimensions(spec.hidden_size) == theirs.get_embedding_dimension()
    assert ours.normalize == any(isinstance(module, Normalize) for module in theirs)
    assert (ours.prompts, ours.default_prompt or None) == (theirs.prompts, theirs.default_prompt_name)
    assert (ours.max_length or spec.context_length) == min(theirs.max_seq_length, spec.context_length)
    assert not spec.has_head
    vector = np.random.default_rng(0).standard_normal(HIDDEN, np.float32)
    features = {"sentence_embedding": torch.from_numpy(vector)[None]}
    with torch.inference_mode():
        for module in [module for module in theirs if isinstance(module, Dense)]:
            features = module(features)
    assert np.abs(VectorHead(spec)(vector) - features["sentence_embedding"][0].numpy()).max() < 1e-5


def last_state(directory: Path, text: str) -> np.ndarray:
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(directory), AutoModel.from_pretrained(directory)
    with torch.inference_mode():
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1].numpy()


@pytest.mark.parametrize(("num_labels", "is_resaved"), [(1, False), (3, False), (1, True), (3, True)])
def test_a_head_of_classes_gives_their_logits(tmp_path: Path, num_labels: int, is_resaved: bool) -> None:
    names = {number: f"label {number}" for number in range(num_labels)}
    directory = write_llama(tmp_path / "m", AutoModelForSequenceClassification, id2label=names)
    theirs = CrossEncoder(str(directory), device="cpu")
    if is_resaved:
        directory = tmp_path / "resaved"
        theirs.save(str(directory), create_model_card=False)
    spec = resolve_model(str(directory))
    assert spec.pooling.kind == ("score" if num_labels == 1 else "classify")
    assert spec.pooling.labels == tuple(names.values())
    # For several classes it shows logits, as it then writes; transformers' own pipeline shows a softmax.
    assert spec.pooling.activation == ("sigmoid" if num_labels == 1 else "identity" if is_resaved else "softmax")
    assert (spec.pooling.pool, spec.has_head) == ("last", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = theirs.predict([("a", "bc")], activation_fn=torch.nn.Identity())[0]
    found = VectorHead(spec)(last_state(directory, "abc"))
    assert np.abs(found - wanted).max() < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_a_score_by_two_words_is_of_rows_of_the_head(tmp_path: Path, tied: bool) -> None:
    directory = write_llama(tmp_path / "m", AutoModelForCausalLM, tie_word_embeddings=tied)
    words = Transformer(str(directory), transformer_task="text-generation")
    CrossEncoder(modules=[words, LogitScore(70, 60)], device="cpu").save(
        str(tmp_path / "saved"), create_model_card=False
    )
    spec = resolve_model(str(tmp_path / "saved"))
    assert (spec.pooling.kind, spec.pooling.dense[0].rows, spec.has_head) == ("yes_no", (60, 70), True)
    state = last_state(directory, "abc")
    head = AutoModelForCausalLM.from_pretrained(directory).lm_head.weight.detach().numpy()
    assert np.abs(VectorHead(spec)(state) - head[[60, 70]] @ state).max() < 1e-5


def test_bits_do_not_depend_on_threads(tmp_path: Path) -> None:
    """With a layer as wide as EmbeddingGemma's."""
    torch.manual_seed(2)
    Dense(768, 3072, activation_function=torch.nn.GELU()).save(str(tmp_path))
    layer = of_spec.Dense(768, 3072, "linear.weight", "linear.bias", "gelu", path=str(tmp_path / "model.safetensors"))
    spec = replace(resolve_model("tiny"), pooling=of_spec.Pooling(pool="mean", dense=(layer,)))
    head, vectors = VectorHead(spec), np.random.default_rng(0).standard_normal((8, 768), np.float32)
    before, bits = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            bits.add(b"".join(head(one).tobytes() for one in vectors))
    finally:
        torch.set_num_threads(before)
    assert len(bits) == 1
