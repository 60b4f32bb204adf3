"""What is served of bodies for vectors, `/openapi.json` allows, and it has the routes that the model can serve."""

import json
from collections.abc import Collection
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.errors import ApiError
from nodes.gateway.routes.openapi import document
from nodes.gateway.surfaces.vectors.bodies import NEUTRAL
from nodes.gateway.surfaces.vectors.form import FormReader
from nodes.gateway.surfaces.vectors.routes import VECTORS
from nodes.models.pooling import Pooling
from tests.nodes.gateway.surfaces.vector_forms import CLASSES, EMBEDDING, SCORE, YES_NO, config_of

TEXTS = st.sampled_from(["", "a", "m", "query", "left", "base64", "x" * 129, "x" * 4097])
NUMBERS = st.sampled_from([-2, -1, 0, 1, 2, 8, 9, 299, 300, 2**31 - 1, 2**31, 0.5])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
LISTS = st.lists(SCALARS, max_size=6) | st.lists(st.lists(NUMBERS, max_size=2), max_size=6)
TEXT_LISTS = st.lists(st.sampled_from(["a", "bc"]), max_size=6)
DOCUMENTS = st.lists(TEXTS | st.builds(lambda text: {"text": text}, TEXTS | NUMBERS), max_size=6)
INPUTS = TEXTS | LISTS | TEXT_LISTS | DOCUMENTS
OF_KINDS = {"embedding": EMBEDDING, "score": SCORE, "classify": CLASSES, "yes_no": YES_NO}
DOCUMENTS_OF = {kind: json.loads(document("1", config_of(pooling))) for kind, pooling in OF_KINDS.items()}


WORDS = ("START", "END", "NONE", "left", "Right", "query", "search_document", "classification", "clustering")
FORMS = (("input",), ("inputs",), ("text",), ("input_ids",), ("query", "documents"), ("query", "texts"),
         ("text_1", "text_2"), ("queries", "documents"))  # fmt: skip


def bodies(schema: dict[str, Any], own: Collection[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Most of the time one of its forms with what that needs, and a few fields beside, of any value."""
    names = sorted(schema["properties"].keys() - (NEUTRAL.keys() - set(own)))
    forms = [form for form in FORMS if {*form} <= {*names}]
    lists = dict.fromkeys(("documents", "texts"), TEXT_LISTS.filter(bool)) | {"input_ids": st.just([1, 2])}
    good = [st.fixed_dictionaries({name: lists.get(name, st.just("a")) for name in form}) for form in forms]
    main = {name for form in forms for name in form}
    values = {name: INPUTS if name in main else SCALARS | st.sampled_from(WORDS) for name in names}
    few = st.lists(st.sampled_from(names), max_size=2, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: values[name] for name in chosen})
    )
    return st.tuples(st.one_of(good), few).map(lambda both: both[0] | both[1])


@pytest.mark.parametrize("kind", OF_KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_document_allows_what_is_served(kind: str, data: st.DataObject) -> None:
    whole = DOCUMENTS_OF[kind]
    path = data.draw(st.sampled_from(sorted(VECTORS.keys() & whole["paths"].keys())))
    schema = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    body = data.draw(bodies(properties, VECTORS[path].body.__struct_fields__))
    checked = jsonschema.Draft202012Validator({**schema, "components": whole["components"]})
    reader = FormReader(VECTORS[path], config_of(OF_KINDS[kind]))
    try:
        reader.job(json.dumps(body).encode(), "id")
    except ApiError:
        return
    assert checked.is_valid(body), (path, body)


def test_only_what_the_model_can_serve_is_in_the_document() -> None:
    def paths(pooling: Pooling | None) -> set[str]:
        return json.loads(document("1", config_of(pooling)))["paths"].keys() & VECTORS.keys()

    whole = json.loads(document("1", config_of(EMBEDDING, makes_text=False)))["paths"]
    texts = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
    assert not texts & whole.keys()
    assert texts <= DOCUMENTS_OF["embedding"]["paths"].keys()
    scored = {path for path in VECTORS if "score" in path or "rerank" in path}
    assert paths(None) == set()
    assert paths(EMBEDDING) == scored | {"/v1/embeddings", "/embeddings", "/embed", "/encode"}
    assert paths(SCORE) == paths(YES_NO) == scored | {"/classify", "/v1/classify", "/encode"}
    assert paths(CLASSES) == {"/classify", "/v1/classify", "/encode"}


@pytest.mark.parametrize("kind", OF_KINDS)
def test_neutral_values_and_examples_are_served(kind: str) -> None:
    for path in VECTORS.keys() & DOCUMENTS_OF[kind]["paths"].keys():
        content = DOCUMENTS_OF[kind]["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        reader = FormReader(VECTORS[path], config_of(OF_KINDS[kind]))
        assert not reader.job(json.dumps(content["example"]).encode(), "id").unknown_fields
        # A body's own fields have values of their own.
        for name in NEUTRAL.keys() - set(VECTORS[path].body.__struct_fields__):
            for value in (None, *NEUTRAL[name]):
                assert reader.job(json.dumps(content["example"] | {name: value}).encode(), "id")
            with pytest.raises(ApiError, match=name):
                reader.job(json.dumps(content["example"] | {name: "else"}).encode(), "id")
