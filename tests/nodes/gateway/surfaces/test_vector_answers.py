"""Answers of the routes for vectors, by rows that are given: numbers and forms."""

import base64
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.gateway.surfaces.vectors.numbers import activated, cosine, normalized, row_of
from nodes.models.pooling import Dense, Pooling
from tests.nodes.gateway.surfaces.vector_forms import CLASSES, EMBEDDING, HIDDEN, SCORE, YES_NO, answer_of

NUMBERS = st.floats(-1000, 1000, width=32)
ROWS = st.lists(NUMBERS, min_size=1, max_size=HIDDEN)


def letters(text: str) -> list[float]:
    """Rows that differ with their texts: how often each of some letters is there."""
    return [float(text.count(letter)) for letter in "abcdefgh"]


def test_embeddings_as_numbers_and_as_base64() -> None:
    numbers = answer_of("/v1/embeddings", EMBEDDING, letters, input=["aab", "c"])
    assert numbers == {
        "id": "id-1", "object": "list", "created": 7, "model": "m",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [2, 1, 0, 0, 0, 0, 0, 0]},
            {"object": "embedding", "index": 1, "embedding": [0, 0, 1, 0, 0, 0, 0, 0]},
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }  # fmt: skip
    encoded = answer_of("/v1/embeddings", EMBEDDING, letters, input=["aab", "c"], encoding_format="base64")
    unpacked = [struct.unpack("<8f", base64.b64decode(one["embedding"])) for one in encoded["data"]]
    assert unpacked == [(2, 1, 0, 0, 0, 0, 0, 0), (0, 0, 1, 0, 0, 0, 0, 0)]


def shown(path: str, pooling: Pooling = EMBEDDING, **body: Any) -> list[float]:
    field = "inputs" if path == "/embed" else "input"
    (found,) = answer_of(path, pooling, lambda _: [3, 4, 12, 0, 0, 0, 0, 0], **{field: ["a"]}, **body)[
        slice(None) if path == "/embed" else "data"
    ]
    return found if path == "/embed" else found["embedding"]


def test_lengths_of_vectors() -> None:
    normal = Pooling(pool="last", normalize=True)
    whole = [3, 4, 12, 0, 0, 0, 0, 0]
    of_length_one = pytest.approx([number / 13 for number in whole])
    assert shown("/v1/embeddings") == whole
    assert shown("/v1/embeddings", normal) == of_length_one
    assert shown("/v1/embeddings", normal, normalize=False) == whole
    assert shown("/v1/embeddings", use_activation=True) == of_length_one
    assert shown("/v1/embeddings", dimensions=2) == pytest.approx([0.6, 0.8])
    assert shown("/v1/embeddings", dimensions=2, normalize=False) == [3, 4]
    assert shown("/embed") == of_length_one
    assert shown("/embed", normalize=False, dimensions=1) == [3]


def test_scores_of_embeddings_are_cosines() -> None:
    found = answer_of("/score", EMBEDDING, letters, text_1="ab", text_2=["ba", "a", "c"])
    assert [one["score"] for one in found["data"]] == pytest.approx([1, 2**-0.5, 0])
    assert (found["object"], found["data"][1]["object"], found["data"][1]["index"]) == ("list", "score", 1)
    # The prompt of queries counts.
    assert found["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    found = answer_of("/score", EMBEDDING, letters, queries=["a", "b"], documents=["a", "a"])
    assert [one["score"] for one in found["data"]] == pytest.approx([1, 0])


def test_scores_of_pairs() -> None:
    def logit(text: str) -> list[float]:
        return [float(text.count("x")) - 1]

    for pooling, activate in ((SCORE, lambda x: 1 / (1 + math.exp(-x))), (plain(SCORE), float)):
        found = answer_of("/score", pooling, logit, text_1="q", text_2=["x", "", "xxx"][::2])
        assert [one["score"] for one in found["data"]] == pytest.approx([activate(0), activate(2)])
    raw = answer_of("/score", SCORE, logit, text_1="q", text_2=["x", "xxx"], use_activation=False)
    assert [one["score"] for one in raw["data"]] == [0, 2]


def plain(pooling: Pooling) -> Pooling:
    return Pooling(pool=pooling.pool, kind=pooling.kind, dense=pooling.dense, labels=pooling.labels)


def test_the_share_of_yes() -> None:
    def logits(text: str) -> list[float]:
        return [1.0, 3.0] if "good" in text else [1.0, 1.0]

    found = answer_of("/rerank", YES_NO, logits, query="q", documents=["bad", "good"])
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [
        (1, pytest.approx(1 / (1 + math.exp(-2)))), (0, 0.5),
    ]  # fmt: skip
    raw = answer_of("/rerank", YES_NO, logits, query="q", texts=["bad", "good"], raw_scores=True)
    assert raw == [{"index": 1, "score": 2}, {"index": 0, "score": 0}]
    assert answer_of("/classify", YES_NO, logits, input="good")["data"][0]["label"] == "yes"


DOCUMENTS = ["x", "xxx", "xx", "xxx"]


def test_ranks() -> None:
    def count(text: str) -> list[float]:
        return [float(text.count("x"))]

    pooling = plain(SCORE)
    found = answer_of("/v1/rerank", pooling, count, query="q", documents=DOCUMENTS)
    assert found == {
        "id": "id-1", "model": "m",
        "results": [
            {"index": index, "relevance_score": score, "document": {"text": "x" * score}}
            for index, score in ((1, 3), (3, 3), (2, 2), (0, 1))
        ],
        "usage": {"prompt_tokens": 13, "total_tokens": 13},
    }  # fmt: skip
    body = {"query": "q", "documents": DOCUMENTS, "return_documents": False}
    for top_n, num in ((2, 2), (0, 4), (9, 4), (None, 4)):
        found = answer_of("/v2/rerank", pooling, count, **body, top_n=top_n)
        assert [one.keys() for one in found["results"]] == [{"index", "relevance_score"}] * num
    # SGLang's router names a `rid` in every body, and reads a list.
    for rid in (None, "mine"):
        body = {"query": "q", "documents": DOCUMENTS, "rid": rid, "top_k": 2}
        found = answer_of("/v1/rerank", pooling, count, **body, model="unknown", return_documents=True, user=None)
        assert found == [{"index": 1, "score": 3, "document": "xxx"}, {"index": 3, "score": 3, "document": "xxx"}]
        found = answer_of("/v1/rerank", pooling, count, **body, return_documents=False)
        assert found == [{"index": 1, "score": 3}, {"index": 3, "score": 3}]
    found = answer_of("/rerank", pooling, count, query="q", texts=DOCUMENTS, return_text=True)
    assert found[0] == {"index": 1, "score": 3, "text": "xxx"}
    assert answer_of("/rerank", pooling, count, query="q", documents=["x"])["results"][0]["document"] == {"text": "x"}


def test_classes() -> None:
    found = answer_of("/classify", CLASSES, lambda _: [0, math.log(2), 0], input=["x", "y"])
    assert found["data"][1] == {
        "index": 1, "label": "b", "probs": pytest.approx([0.25, 0.5, 0.25]), "num_classes": 3,
    }  # fmt: skip
    assert (found["object"], found["usage"]) == ("list", {"prompt_tokens": 2, "total_tokens": 2})
    raw = answer_of("/classify", CLASSES, lambda _: [0, 2, 0], input="x", use_activation=False)
    assert raw["data"][0]["probs"] == [0, 2, 0]
    unnamed = Pooling(pool="last", kind="classify", dense=(Dense(HIDDEN, 2, "w"),))
    assert answer_of("/classify", unnamed, lambda _: [0, 1], input=[5])["data"][0]["label"] == "LABEL_1"
    reward = answer_of("/classify", SCORE, lambda _: [0.5], text="x")
    assert reward == {"embedding": [0.5], "meta_info": {"id": "id-1", "prompt_tokens": 1}}
    assert [one["meta_info"]["id"] for one in answer_of("/classify", SCORE, lambda _: [0], text=["x", "y"])] == [
        "id-1-0", "id-1-1",
    ]  # fmt: skip


def test_rows_are_vectors_as_elsewhere_or_what_a_head_says() -> None:
    bare = Pooling(pool="mean")
    for text, ids in (("ab", [97, 98]), (["ab", "c"], [[97, 98], [99]])):
        for fields in ({}, {"normalize": True}, {"dimensions": 1}, {"dimensions": 2, "normalize": False}):

            def numbers(text: str) -> list[float]:
                return [3, 4] if text == "ab" else [0, 7]

            data = answer_of("/v1/embeddings", bare, numbers, input=text, **fields)["data"]
            found = answer_of("/encode", bare, numbers, text=text, **fields)
            assert found == answer_of("/encode", bare, numbers, input_ids=ids, **fields)
            listed = found if isinstance(text, list) else [found]
            assert [one["embedding"] for one in listed] == [one["embedding"] for one in data]
    named = answer_of("/encode", CLASSES, lambda text: [len(text)] * 3, text=["x", "yz"], rid="mine")
    assert named == [
        {"embedding": [1, 1, 1], "meta_info": {"id": "mine_0", "prompt_tokens": 1}},
        {"embedding": [2, 2, 2], "meta_info": {"id": "mine_1", "prompt_tokens": 2}},
    ]
    assert answer_of("/encode", SCORE, lambda _: [0.5], input_ids=[[9]], rid="mine")[0]["meta_info"]["id"] == "mine"
    each = answer_of("/encode", SCORE, lambda _: [0.5], text=["x", "yz"], rid=["a", "b"])
    assert [one["meta_info"]["id"] for one in each] == ["a", "b"]


@given(ROWS, ROWS)
def test_numbers(one: list[float], other: list[float]) -> None:
    row = row_of(struct.pack(f"<{len(one)}f", *one))
    assert row.tolist() == one
    length = math.sqrt(sum(number**2 for number in one))
    if length > 1e-3:
        assert math.sqrt(sum(number**2 for number in normalized(row).tolist())) == pytest.approx(1, abs=1e-5)
        assert cosine(row, row) == pytest.approx(1)
    else:
        assert np.isfinite(normalized(row)).all()
    size = min(len(one), len(other))
    pair = row[:size], np.array(other[:size], np.float32)
    assert -1 - 1e-9 <= cosine(*pair) <= 1 + 1e-9
    shares = activated(row, "softmax")
    assert shares.dtype == np.float32
    assert shares.sum() == pytest.approx(1, abs=1e-5)
    squeezed = activated(row, "sigmoid")
    assert ((squeezed >= 0) & (squeezed <= 1)).all()
    for number, share in zip(one, squeezed.tolist(), strict=True):
        assert share == pytest.approx(1 / (1 + math.exp(-max(number, -700))), abs=1e-6)
