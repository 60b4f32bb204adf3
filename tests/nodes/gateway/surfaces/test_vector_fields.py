"""Every field of every body for vectors does something, which is shown here, or is said to do nothing."""

from typing import Any

import pytest

from nodes.gateway.errors import ApiError
from nodes.gateway.surfaces.vectors.bodies import NEUTRAL
from nodes.gateway.surfaces.vectors.routes import VECTORS
from nodes.models.pooling import Pooling
from tests.nodes.gateway.surfaces.vector_forms import CLASSES, EMBEDDING, SCORE, YES_NO, answer_of, job_of

EMBED, TEI, ENCODE, SCORES, CLASSIFY = "/v1/embeddings", "/embed", "/encode", "/score", "/classify"
RANKS = {"query": "q", "documents": ["a", "bb"]}
TEXTS = {"query": "q", "texts": ["a", "bb"]}
BASES: dict[str, tuple[Pooling, dict[str, Any]]] = {
    EMBED: (EMBEDDING, {"input": ["a", "bb"]}),
    TEI: (EMBEDDING, {"inputs": ["a", "bb"]}),
    ENCODE: (EMBEDDING, {"text": ["a", "bb"]}),
    SCORES: (SCORE, {"text_1": "q", "text_2": ["a", "bb"]}),
    "/rerank": (SCORE, RANKS),
    "/v1/rerank": (SCORE, RANKS),
    CLASSIFY: (CLASSES, {"input": ["a", "bb"]}),
}
"""A body of each form, to which a field is added."""
FORMS = {path: VECTORS[path].body for path in BASES}

CUT = {"truncate_prompt_tokens": 7}
EVERYWHERE: dict[str, Any] = {
    "priority": 3, "request_id": "mine", "rid": "mine", "cache_salt": "s", "extra_key": "k",
    "truncate_prompt_tokens": 7, "truncation_side": CUT | {"truncation_side": "left"},
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    EMBED: {
        "input": "other", "encoding_format": "base64", "dimensions": 2, "normalize": True, "use_activation": True,
        "prompt_name": "web", "input_type": "query", "truncate": "START", "add_special_tokens": False,
    },
    TEI: {
        "inputs": "other", "truncate": True, "dimensions": 2, "normalize": False, "prompt_name": "web",
        "truncation_direction": {"truncate": True, "truncation_direction": "Left"},
    },
    ENCODE: {
        "text": "other", "input_ids": {"text": None, "input_ids": [1]}, "dimensions": 2, "normalize": True,
        "prompt_name": "web", "rid": ["one", "two"],
    },
    SCORES: {
        "text_1": "other", "text_2": "other", "use_activation": False,
        "queries": {"text_1": None, "text_2": None, "queries": "q", "documents": "other"},
        "documents": {"text_1": None, "text_2": None, "queries": "q", "documents": "other"},
    },
    "/rerank": {
        "query": "other", "documents": ["other"], "top_n": 1, "top_k": 1, "return_documents": False,
        "use_activation": False, "texts": {"documents": None, "texts": ["a"]},
        "truncate": {"documents": None, "texts": ["a"], "truncate": True},
        "truncation_direction": {
            "documents": None, "texts": ["a"], "truncate": True, "truncation_direction": "Left",
        },
        "raw_scores": {"documents": None, "texts": ["a"], "raw_scores": True},
        "return_text": {"documents": None, "texts": ["a"], "return_text": True},
    },
    "/v1/rerank": {
        "query": "other", "documents": ["other"], "top_n": 1, "top_k": 1, "return_documents": False,
        "use_activation": False,
    },
    CLASSIFY: {
        "input": "other", "use_activation": False, "add_special_tokens": False,
        "text": {"input": None, "text": "a"},
    },
}  # fmt: skip
"""By path, values of its fields that change something; where a field needs others, all of them."""
WITHOUT = {"user", "model"}
"""A user is accepted and does nothing, as docs/clients.md says; a model that is not the served one is refused."""
REFUSED = {"instruct"}
"""By models whose template has no place for it."""


def numbers(text: str) -> list[float]:
    return [1.0 + len(text), float(text.count("a")), 2.0]


def shown(path: str, body: dict[str, Any]) -> Any:
    """All that a body leads to: what a tokenizer is asked for, how it is scheduled and named, and the answer."""
    pooling = BASES[path][0]
    job = job_of(path, pooling, body)
    rows = (lambda text: numbers(text)[:1]) if pooling is SCORE else numbers
    return job.prepare, job.priority, job.client_id, job.own.inputs, answer_of(path, pooling, rows, **body)


def added(path: str, field: str) -> dict[str, Any]:
    value = (EVERYWHERE | OWN[path])[field]
    return value if isinstance(value, dict) and field in value else {field: value}


@pytest.mark.parametrize("path", BASES)
def test_the_table_has_every_field(path: str) -> None:
    assert {*EVERYWHERE, *OWN[path], *WITHOUT, *REFUSED} >= {*FORMS[path].__struct_fields__}
    assert {one.body for one in VECTORS.values()} == {*FORMS.values()}


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path in BASES for field in FORMS[path].__struct_fields__ if field not in WITHOUT | REFUSED],
)
def test_a_field_does_something(path: str, field: str) -> None:
    body, given = BASES[path][1], added(path, field)
    try:
        before = shown(path, body | {name: value for name, value in given.items() if name != field})
    except ApiError:
        # What the body's other form cannot do without.
        before = shown(path, body)
    assert shown(path, body | given) != before


@pytest.mark.parametrize("path", BASES)
def test_a_user_changes_nothing(path: str) -> None:
    body = BASES[path][1]
    assert shown(path, body | {"user": "somebody"}) == shown(path, body)


def test_an_instruction_is_refused_where_it_would_do_nothing() -> None:
    body = {"query": "q", "documents": ["a"], "instruct": "x"}
    with pytest.raises(ApiError, match="'instruct' is not supported by this model"):
        job_of("/rerank", SCORE, body)
    told = job_of("/rerank", YES_NO, body).own.inputs.texts
    assert told != job_of("/rerank", YES_NO, body | {"instruct": "y"}).own.inputs.texts


@pytest.mark.parametrize("path", BASES)
def test_words_of_other_servers_are_refused_by_name(path: str) -> None:
    pooling, body = BASES[path]
    sent = {
        "task": "retrieval.query", "prompt": "p", "instruction": "i", "truncation": True, "normalized": True,
        "embedding_type": "ubinary", "output_dtype": "int8", "late_chunking": True, "return_multivector": True,
        "images": ["x"], "modality": "image", "max_tokens": 5, "activation": False, "softmax": False,
        "input_type": "image", "truncate": "MIDDLE", "embed_dtype": "float16", "rank_fields": ["title"],
    }  # fmt: skip
    for field, value in sent.items():
        with pytest.raises(ApiError, match=f"'{field}'") as refused:
            job_of(path, pooling, body | {field: value})
        assert (refused.value.status, refused.value.param) == (400, field)
    # What their clients send by default changes nothing.
    for field in sent.keys() - set(FORMS[path].__struct_fields__):
        for value in (None, *NEUTRAL[field]):
            assert shown(path, body | {field: value}) == shown(path, body)
