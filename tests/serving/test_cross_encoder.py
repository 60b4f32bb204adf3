"""Pairs of texts on a whole mesh with a small BERT that scores them: transformers' numbers, token types and cuts."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

pytestmark = pytest.mark.process

MARKS = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
WORDS = [*MARKS.values(), *["what", "is", "red", "an", "apple", "of", "the", "sea", "round", "and", "deep"]]
QUERY = "what is red"
DOCUMENTS = ["an apple is round", "the sea is deep and the apple is red", "an unknown sea", "the sea"]
LONGEST = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the tokenizer of its few words."""
    folder = tmp_path_factory.mktemp("cross-encoder")
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **MARKS).save_pretrained(folder)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=LONGEST, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    BertForSequenceClassification(config).eval().save_pretrained(folder)
    return folder


@torch.no_grad()
def scores_of(folder: Path, documents: list[str], **options: Any) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    encoded = [tokenizer(QUERY, text, return_tensors="pt", **options) for text in documents]
    assert all(one["token_type_ids"].sum() for one in encoded)
    return [torch.sigmoid(model(**one).logits[0, 0]).item() for one in encoded]


def test_pairs_are_scored_as_transformers_scores_them(mesh_of: Any, folder: Path) -> None:
    mesh = mesh_of("--model", str(folder))

    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(mesh.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    expected = pytest.approx(scores_of(folder, DOCUMENTS), abs=1e-4)
    assert [one["score"] for one in post("/score", text_1=QUERY, text_2=DOCUMENTS)["data"]] == expected
    ranked = post("/v2/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [one["relevance_score"] for one in sorted(ranked, key=lambda one: one["index"])] == expected
    assert ranked == sorted(ranked, key=lambda one: -one["relevance_score"])
    long = DOCUMENTS[1] + " and deep" * 200
    cut = scores_of(folder, [long], truncation=True, max_length=LONGEST)
    body = {"query": QUERY, "texts": [long]}
    assert [one["score"] for one in post("/rerank", **body, truncate=True)] == pytest.approx(cut, abs=1e-4)
    # [CLS] query [SEP] document [SEP]: of each of the two texts one token has to be left.
    for most, status in ((0, 400), (1, 400), (3, 400), (4, 400), (5, 200)):
        answered, answer = mesh.post(
            "/v1/rerank", {"query": QUERY, "documents": [long], "truncate_prompt_tokens": most}
        )
        assert answered == status
        assert status == 200 or answer["error"]["param"] == "truncate_prompt_tokens"
    shortest = scores_of(folder, [long], truncation=True, max_length=5)
    assert answer["results"][0]["relevance_score"] == pytest.approx(shortest[0], abs=1e-4)
    status, answer = mesh.post("/rerank", body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "texts.0", "context_length_exceeded")
    assert len(post("/rerank", query=QUERY, documents=DOCUMENTS * 25)["results"]) == 100
