"""Bodies of the routes for vectors: what becomes an input, and errors that name the field and the place in it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.gateway.errors import ApiError
from nodes.gateway.surfaces.vectors.inputs import Inputs, check_lengths, parts_of
from nodes.models.pooling import Pooling
from nodes.protocol import Prepare, Prepared
from nodes.request import VECTORS
from tests.nodes.gateway.surfaces.vector_forms import CLASSES, EMBEDDING, SCORE, YES_NO, config_of, job_of


def inputs_of(path: str, pooling: Pooling, **body: Any) -> Inputs:
    return job_of(path, pooling, body).own.inputs


def test_texts_and_ids() -> None:
    for path, field in (("/v1/embeddings", "input"), ("/embeddings", "input"), ("/embed", "inputs")):
        assert inputs_of(path, EMBEDDING, **{field: "abc"}) == Inputs([field], ["abc"])
        assert inputs_of(path, EMBEDDING, **{field: ["a", "b"]}) == Inputs([f"{field}.0", f"{field}.1"], ["a", "b"])
        assert inputs_of(path, EMBEDDING, **{field: [1, 2]}) == Inputs([field], token_ids=[[1, 2]])
        assert inputs_of(path, EMBEDDING, **{field: [[1], [2]]}).token_ids == [[1], [2]]


def test_what_goes_to_the_tokenizer() -> None:
    body = {"input": ["abc"], "priority": -1, "request_id": "mine", "extra_key": "tenant", "user": "u", "more": 1}
    job = job_of("/v1/embeddings", EMBEDDING, body)
    assert (job.kind, job.prepare.asks, job.n, job.priority) == ("mean", [VECTORS], 1, -1)
    assert (job.client_id, job.prepare.extra_key, job.unknown_fields) == ("mine", ":tenant", ["more"])
    assert (job.prepare.truncate_to, job.own.inputs.add_special_tokens) == (0, True)
    assert job_of("/classify", CLASSES, {"input": "a", "add_special_tokens": False}).own.inputs[4] is False


def test_prompts_are_put_before_texts() -> None:
    default = Pooling(pool="mean", prompts={"query": "q: ", "passage": "p: "}, default_prompt="passage")
    assert inputs_of("/v1/embeddings", EMBEDDING, input=["a"]).texts == ["a"]
    assert inputs_of("/v1/embeddings", EMBEDDING, input=["a"], prompt_name="web").texts == ["w: a"]
    assert inputs_of("/embed", default, inputs=["a"]).texts == ["p: a"]
    assert inputs_of("/embed", default, inputs=[[1]]).token_ids == [[1]]
    # As `encode_query` and `encode_document` of sentence-transformers.
    assert inputs_of("/rerank", EMBEDDING, query="a", documents=["b"]).texts == ["q: a", "b"]
    assert inputs_of("/rerank", default, query="a", documents=["b"]).texts == ["q: a", "p: b"]
    other = Pooling(pool="mean", prompts={"plain": "n: "}, default_prompt="plain")
    assert inputs_of("/rerank", other, query="a", documents=["b"]).texts == ["a", "b"]


@pytest.mark.parametrize(
    ("prompts", "kind", "text"),
    [
        # As `encode_query` and `encode_document`: a prompt of this name or none, whatever is the default one.
        ({"query": "q: ", "passage": "p: "}, "query", "q: a"),
        ({"query": "q: ", "passage": "p: "}, "search_query", "q: a"),
        ({"query": "q: ", "passage": "p: "}, "passage", "p: a"),
        ({"query": "q: ", "passage": "p: "}, "document", "p: a"),
        ({"query": "q: ", "passage": "p: "}, "search_document", "p: a"),
        ({"query": "q: "}, "passage", "a"),
        ({"query": "q: ", "other": "o: "}, "passage", "a"),
        # The name itself goes before others that mean the same.
        ({"search_query": "s: ", "query": "q: "}, "search_query", "s: a"),
        ({"search_query": "s: ", "search_document": "d: "}, "query", "s: a"),
        ({"search_query": "s: ", "search_document": "d: "}, "document", "d: a"),
        ({"clustering": "c: "}, "clustering", "c: a"),
        # To a model without prompts all texts are alike.
        ({}, "query", "a"),
        ({}, "classification", "a"),
    ],
)
def test_input_types_choose_prompts(prompts: dict[str, str], kind: str, text: str) -> None:
    pooling = Pooling(pool="mean", prompts=prompts, default_prompt="other" if "other" in prompts else "")
    assert inputs_of(EMBED, pooling, input=["a"], input_type=kind).texts == [text]
    if text == "a":
        assert inputs_of(EMBED, pooling, input=[1], input_type=kind).token_ids == [[1]]
    else:
        with pytest.raises(ApiError, match="a prompt and ids cannot be joined") as refused:
            inputs_of(EMBED, pooling, input=[1], input_type=kind)
        assert refused.value.param == "input_type"


def test_pairs() -> None:
    for body in ({"text_1": "a", "text_2": ["b", "c"]}, {"queries": ["a"], "documents": ["b", "c"]}):
        inputs = inputs_of("/score", SCORE, **body)
        assert (inputs.texts, inputs.seconds, inputs.add_special_tokens) == (["a", "a"], ["b", "c"], True)
    assert inputs.names == ["documents.0", "documents.1"]
    inputs = inputs_of("/v1/score", SCORE, text_1=["a", "b"], text_2=["c", "d"])
    assert (inputs.texts, inputs.seconds) == (["a", "b"], ["c", "d"])
    inputs = inputs_of("/v2/rerank", SCORE, query="a", documents=["b", {"text": "c"}])
    assert (inputs.texts, inputs.seconds) == (["a", "a"], ["b", "c"])
    inputs = inputs_of("/rerank", SCORE, query="a", texts=["b"])
    assert (inputs.names, inputs.texts, inputs.seconds) == (["texts.0"], ["a"], ["b"])
    # A query is embedded once.
    assert inputs_of("/score", EMBEDDING, text_1="a", text_2=["b", "c"]).texts == ["q: a", "b", "c"]


def test_qwen3_reranker_gets_its_template() -> None:
    inputs = inputs_of("/rerank", YES_NO, query="What is red?", documents=["An apple."])
    whole = inputs.texts[0] + (inputs.seconds or [""])[0] + inputs.after
    assert whole == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: What is red?\n<Document>: An apple."
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert not inputs.add_special_tokens
    told = inputs_of("/score", YES_NO, text_1="a", text_2="b", instruct="Be quick")
    assert "<Instruct>: Be quick\n<Query>: a\n" in told.texts[0]


@pytest.mark.parametrize(
    ("path", "fields", "truncate_to", "keeps_first"),
    [
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 7}, 7, True),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -1, "truncation_side": "left"}, 50, False),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5000}, 50, True),
        # NIM's and Cohere's names of what goes.
        ("/v1/embeddings", {"input": "a", "truncate": "END"}, 50, True),
        ("/v1/embeddings", {"input": "a", "truncate": "START"}, 50, False),
        ("/v1/embeddings", {"input": "a", "truncate": "NONE"}, 0, False),
        ("/v1/embeddings", {"input": "a", "truncate": "START", "truncate_prompt_tokens": 7}, 7, False),
        ("/v1/embeddings", {"input": "a", "truncate": True, "truncation_side": "left"}, 50, False),
        ("/v1/embeddings", {"input": "a", "truncate": False}, 0, False),
        ("/embed", {"inputs": "a", "truncate": True}, 50, True),
        ("/embed", {"inputs": "a", "truncate": True, "truncation_direction": "Left"}, 50, False),
        ("/embed", {"inputs": "a", "truncate": False}, 0, False),
        ("/rerank", {"query": "a", "texts": ["b"], "truncate": True}, 50, True),
    ],
)
def test_truncation(path: str, fields: dict[str, Any], truncate_to: int, keeps_first: bool) -> None:
    prepare = job_of(path, EMBEDDING, fields).prepare
    assert (prepare.truncate_to, prepare.truncate_end) == (truncate_to, keeps_first)


EMBED, TOO_MANY = "/v1/embeddings", ["a"] * 6


@pytest.mark.parametrize(
    ("path", "pooling", "fields", "param", "code"),
    [
        (EMBED, None, {"input": "a"}, None, "no_pooling"),
        (EMBED, SCORE, {"input": "a"}, None, "unsupported_model"),
        ("/classify", EMBEDDING, {"input": "a"}, None, "unsupported_model"),
        ("/score", CLASSES, {"text_1": "a", "text_2": "b"}, None, "unsupported_model"),
        (EMBED, EMBEDDING, {"input": "a", "model": "other"}, "model", "model_not_found"),
        (EMBED, EMBEDDING, {}, "input", "missing_required_parameter"),
        (EMBED, EMBEDDING, {"input": ""}, "input", "empty_prompt"),
        (EMBED, EMBEDDING, {"input": []}, "input", "invalid_value"),
        (EMBED, EMBEDDING, {"input": ["a", ""]}, "input.1", "empty_prompt"),
        (EMBED, EMBEDDING, {"input": [[1], []]}, "input.1", "empty_prompt"),
        (EMBED, EMBEDDING, {"input": ["a", 1]}, "input", "invalid_value"),
        (EMBED, EMBEDDING, {"input": [1, [2]]}, "input", "invalid_value"),
        (EMBED, EMBEDDING, {"input": [1, 300]}, "input", "invalid_token_id"),
        (EMBED, EMBEDDING, {"input": [[1], [300]]}, "input.1", "invalid_token_id"),
        (EMBED, EMBEDDING, {"input": [-1]}, "input.0", "invalid_value"),
        (EMBED, EMBEDDING, {"input": TOO_MANY}, "input", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "n": 2}, "n", "unsupported_parameter"),
        (EMBED, EMBEDDING, {"input": "a", "stream": True}, "stream", "unsupported_parameter"),
        (EMBED, EMBEDDING, {"input": "a", "dimensions": 9}, "dimensions", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "prompt_name": "none"}, "prompt_name", "invalid_value"),
        (EMBED, EMBEDDING, {"input": [1], "prompt_name": "web"}, "prompt_name", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "input_type": "web"}, "input_type", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "input_type": "clustering"}, "input_type", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "input_type": "query", "prompt_name": "web"}, "input_type", "invalid_value"),
        (EMBED, EMBEDDING, {"input": "a", "truncate": "MIDDLE"}, "truncate", "invalid_value"),
        (
            EMBED,
            EMBEDDING,
            {"input": "a", "truncate": "END", "truncation_side": "left"},
            "truncation_side",
            "invalid_value",
        ),
        (
            EMBED,
            EMBEDDING,
            {"input": "a", "normalize": True, "use_activation": False},
            "use_activation",
            "invalid_value",
        ),
        ("/embed", EMBEDDING, {"inputs": "a", "truncate": "END"}, "truncate", "invalid_value"),
        (
            "/embed",
            EMBEDDING,
            {"inputs": "a", "truncation_side": "left", "truncation_direction": "Left"},
            "truncation_direction",
            "invalid_value",
        ),
        ("/rerank", SCORE, {"query": "a", "documents": ["b"], "top_n": 1, "top_k": 1}, "top_k", "invalid_value"),
        (EMBED, EMBEDDING, {"messages": [{"role": "user"}], "input": "a"}, "messages", "unsupported_parameter"),
        ("/encode", None, {"text": "a"}, None, "no_pooling"),
        ("/encode", EMBEDDING, {}, "text", "missing_required_parameter"),
        ("/encode", EMBEDDING, {"text": "a", "input_ids": [1]}, "input_ids", "invalid_value"),
        ("/encode", EMBEDDING, {"prompt_name": "web", "input_ids": [1]}, "input_ids", "invalid_value"),
        ("/encode", EMBEDDING, {"text": ["a", ""]}, "text.1", "empty_prompt"),
        ("/encode", EMBEDDING, {"input_ids": [[1], [300]]}, "input_ids.1", "invalid_token_id"),
        ("/encode", EMBEDDING, {"text": "a", "dimensions": 9}, "dimensions", "invalid_value"),
        ("/encode", SCORE, {"text": "a", "dimensions": 1}, "dimensions", "unsupported_parameter"),
        ("/score", SCORE, {"text_1": "a"}, "text_2", "missing_required_parameter"),
        ("/score", SCORE, {}, "text_1", "missing_required_parameter"),
        ("/score", SCORE, {"text_1": "a", "documents": "b"}, "documents", "invalid_value"),
        ("/score", SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "invalid_value"),
        ("/score", SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2.1", "empty_prompt"),
        ("/score", SCORE, {"text_1": "a", "text_2": "b", "instruct": "x"}, "instruct", "unsupported_parameter"),
        ("/rerank", SCORE, {"query": "a"}, "documents", "missing_required_parameter"),
        ("/rerank", SCORE, {"query": "a", "documents": ["b"], "texts": ["b"]}, "texts", "invalid_value"),
        ("/rerank", SCORE, {"query": "a", "texts": ["b"], "top_n": 1}, "texts", "invalid_value"),
        ("/rerank", SCORE, {"query": "", "documents": ["b"]}, "query", "empty_prompt"),
        ("/v2/rerank", SCORE, {"query": "a", "documents": ["b", {"text": ""}]}, "documents.1", "empty_prompt"),
        ("/v2/rerank", SCORE, {"query": "a", "documents": []}, "documents", "invalid_value"),
        ("/v2/rerank", SCORE, {"query": "a", "documents": TOO_MANY}, "documents", "invalid_value"),
        ("/v2/rerank", SCORE, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", None),
        ("/v1/rerank", SCORE, {"query": "a", "texts": ["b"]}, "documents", "missing_required_parameter"),
        ("/classify", CLASSES, {"input": "a", "text": "b"}, "text", "invalid_value"),
        ("/classify", CLASSES, {}, "input", "missing_required_parameter"),
        ("/classify", CLASSES, {"text": ["a", ""]}, "text.1", "empty_prompt"),
    ],
)
def test_errors_name_the_field_and_the_input(
    path: str, pooling: Pooling | None, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    with pytest.raises(ApiError) as refused:
        job_of(path, pooling, fields)
    assert (refused.value.param, refused.value.code) == (param, code or "unsupported_parameter")
    assert param is None or param in refused.value.message


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ApiError, match="check_embedding_ctx_length=False"):
        job_of(EMBED, EMBEDDING, {"input": [[99999]]})
    with pytest.raises(ApiError, match=r"--pooling last.*mean, cls"):
        job_of(EMBED, None, {"input": "a"})
    with pytest.raises(ApiError, match=r'Engine\(…, pooling="last"\)'):
        job_of("/encode", None, {"text": "a"})
    with pytest.raises(ApiError, match=r"'stream' is not supported at this route\. Leave it out"):
        job_of(EMBED, EMBEDDING, {"input": "a", "stream": True})
    with pytest.raises(ApiError, match="ask /v1/embeddings, /score or /rerank"):
        job_of("/classify", EMBEDDING, {"input": "a"})


def test_pairs_are_bounded_together() -> None:
    body = {"query": "q" * 100, "documents": ["d"] * 5}
    with pytest.raises(ApiError, match="more than 500 characters"):
        job_of("/rerank", SCORE, body, max_body_bytes=500)
    assert job_of("/rerank", SCORE, body, max_body_bytes=505)
    assert job_of("/rerank", EMBEDDING, body, max_body_bytes=500), "the query is read once"


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=150), st.booleans())
def test_parts_have_all_inputs_in_order_and_what_is_long_by_itself(sizes: list[int], are_ids: bool) -> None:
    names = [f"input.{index}" for index in range(len(sizes))]
    lists = [[index] * size for index, size in enumerate(sizes)]
    texts = [chr(65 + index % 26) * size for index, size in enumerate(sizes)]
    inputs = Inputs(names, token_ids=lists) if are_ids else Inputs(names, texts)
    parts = list(parts_of(inputs, Prepare(request_id="r", truncate_to=3, asks=[VECTORS])))
    found = [one for part in parts for one in (part.prepare.token_ids if are_ids else part.prepare.texts) or []]
    assert found == (lists if are_ids else texts)
    assert [name for part in parts for name in part.names] == names
    ids = [part.prepare.request_id for part in parts]
    assert len({*ids}) == len(ids)
    for part in parts:
        assert names[part.first] == part.names[0]
        assert (part.prepare.truncate_to, part.prepare.asks) == (3, [VECTORS])
        assert (part.prepare.texts is None) is are_ids
        size = sum(sizes[part.first : part.first + len(part.names)])
        assert len(part.names) == 1 or (len(part.names) <= 64 and size <= 16_384)


def test_an_input_that_does_not_fit_is_named() -> None:
    (part,) = parts_of(Inputs(["input.7", "input.8"], ["a", "b"]), Prepare(request_id="r"))
    config = config_of(EMBEDDING)
    check_lengths(part, Prepared(token_ids=[[1] * 50, [1]]), config, "more")
    for ids, code in (([1] * 51, "context_length_exceeded"), ([], "empty_prompt")):
        with pytest.raises(ApiError) as refused:
            check_lengths(part, Prepared(token_ids=[[1], ids]), config, "more")
        assert (refused.value.param, refused.value.code) == ("input.8", code)
    # A prompt needs no room for an output.
    check_lengths(part, Prepared(token_ids=[[1] * 100, [1]]), config_of(SCORE), "more")


def test_what_cannot_be_cut_to_what_is_wanted_is_named() -> None:
    (part,) = parts_of(Inputs(["documents.0"], ["a"], ["b"]), Prepare(request_id="r", truncate_to=10))
    check_lengths(part, Prepared(token_ids=[[1] * 10]), config_of(YES_NO), "more")
    with pytest.raises(ApiError, match=r"'documents.0' cannot be cut to 10: .* take 10 .*shorten the query"):
        check_lengths(part, Prepared(token_ids=[[1] * 11]), config_of(YES_NO), "more")
