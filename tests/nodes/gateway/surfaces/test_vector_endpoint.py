"""The endpoint of vectors in a ring: parts of many inputs, what fails, who leaves, and how much is at work."""

import asyncio
import base64
import contextlib
import json
import struct
from collections import Counter

import httpx
import pytest

from nodes.models.pooling import Dense, Pooling
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import VECTOR_SIZE, play

MEAN = {"pooling": Pooling(pool="mean"), "hidden_size": VECTOR_SIZE}
PAIRS = {"pooling": Pooling(pool="cls", kind="score", dense=(Dense(VECTOR_SIZE, 1, "w"),)), "hidden_size": VECTOR_SIZE}
pytestmark = pytest.mark.settings(**MEAN)


def letters(text):
    return [float(text.count(chr(97 + n))) for n in range(VECTOR_SIZE)]


async def embed(client, inputs, **fields):
    answer = await client.post("/v1/embeddings", json={"input": inputs, **fields})
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


async def test_vectors_are_of_their_inputs(ring, client):
    inputs = ["abc", "aab", "hhh", "abc"]
    assert await embed(client, inputs) == [letters(text) for text in inputs]
    ids = [list(text.encode()) for text in inputs]
    assert await embed(client, ids) == [letters(text) for text in inputs]
    assert await embed(client, ids[0]) == [letters("abc")]
    (encoded,) = await embed(client, "ab", encoding_format="base64")
    assert list(struct.unpack("<8f", base64.b64decode(encoded))) == letters("ab")
    submit = ring.seen.submits[0]
    assert (submit.spec.kind, submit.detokenizer) == ("mean", "t0")


async def test_many_inputs_go_in_parts(ring, client):
    inputs = ["abcdefgh"[n % 8] * (1 + n % 50) for n in range(2048)]
    assert await embed(client, inputs) == [letters(text) for text in inputs]
    assert len(ring.seen.prepares) == 2048 // 64 + bool(2048 % 64)
    assert len({submit.request_id for submit in ring.seen.submits}) == 2048
    await until(lambda: ring.is_idle)


@pytest.mark.settings(**MEAN, max_samples_per_call=64)
async def test_one_call_has_so_many_at_work_and_no_more(ring, client):
    ring.faults.silent = True
    asked = asyncio.ensure_future(embed(client, ["abc"] * 300))
    await until(lambda: len(ring.seen.submits) == 64)
    await asyncio.sleep(0.1)
    assert len(ring.seen.submits) == 64
    ring.faults.silent = False
    ring.scheduler.wake()
    assert await asked == [letters("abc")] * 300


@pytest.mark.settings(**MEAN, max_inflight=100)
async def test_a_call_waits_for_its_own_where_the_gateway_is_full(ring, client):
    assert await embed(client, ["abc"] * 400) == [letters("abc")] * 400
    ring.faults.silent = True
    others = [asyncio.ensure_future(client.post("/v1/embeddings", json={"input": ["a"] * 64})) for _ in range(2)]
    await until(lambda: sum(one.done() for one in others) == 1)
    (refused,) = [one.result() for one in others if one.done()]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    ring.faults.silent = False
    ring.scheduler.wake()
    assert Counter([(await one).status_code for one in others]) == {200: 1, 429: 1}


async def test_what_is_too_long_is_named_before_anything_is_computed(ring, client):
    for inputs, name, code in (
        (["a"] * 100 + ["b" * 201], "input.100", "context_length_exceeded"),
        (["b" * 30_000], "input.0", "context_length_exceeded"),
        ([[97], [98] * 201], "input.1", "context_length_exceeded"),
    ):
        answer = await client.post("/v1/embeddings", json={"input": inputs})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, name, code)
        assert error["message"].startswith("This model's maximum context length is 200 tokens.")
        assert "'truncate_prompt_tokens': -1" in error["message"]
    # What is advised is a field of the body that was sent.
    for path, body in (
        ("/embed", {"inputs": "b" * 201}),
        ("/embed", {"inputs": "b" * 30_000}),
        ("/rerank", {"query": "a", "texts": ["b" * 30_000]}),
    ):
        answer = await client.post(path, json=body)
        assert "'truncate': true" in answer.json()["error"]["message"], answer.text
        assert (await client.post(path, json={**body, "truncate": True})).status_code == 200
    assert len(ring.seen.submits) == 4
    ring.seen.submits.clear()
    assert not ring.seen.submits
    assert await embed(client, ["a" * 200]) == [letters("a" * 200)], "no room is kept for an output"
    assert await embed(client, ["a" * 150 + "b" * 150], truncate_prompt_tokens=-1) == [[150, 50, 0, 0, 0, 0, 0, 0]]
    left = await embed(client, ["a" * 150 + "b" * 150], truncate_prompt_tokens=100, truncation_side="left")
    assert left == [[0, 100, 0, 0, 0, 0, 0, 0]]


async def test_errors_of_the_mesh_name_the_input(ring, client):
    ring.faults.refuse_submits = "never_fits"
    answer = await client.post("/v1/embeddings", json={"input": ["a", "b"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    await until(lambda: ring.is_idle)


async def test_an_attempt_that_fails_and_a_vector_that_is_lost_are_made_good(ring, client):
    ring.faults.failing_attempts = 3
    assert await embed(client, ["abc", "b", "c"]) == [letters(text) for text in ("abc", "b", "c")]
    assert {submit.attempt for submit in ring.seen.submits} >= {0, 1}
    ring.faults.drop_batches = 1
    assert await embed(client, ["abc", "b"]) == [letters("abc"), letters("b")]
    assert ring.seen.resends


async def test_a_client_that_leaves_takes_its_requests_with_it(ring, client):
    ring.faults.silent = True
    with contextlib.suppress(httpx.ReadTimeout):
        await client.post("/v1/embeddings", json={"input": ["abc"] * 300}, timeout=0.3)
    assert ring.seen.submits
    ring.faults.silent = False
    ring.scheduler.wake()
    await until(lambda: ring.is_idle)


async def test_a_gateway_that_stops_answers(ring, client):
    ring.faults.silent = True
    asked = asyncio.ensure_future(client.post("/v1/embeddings", json={"input": ["abc"] * 300}))
    await until(lambda: bool(ring.seen.submits))
    ring.gateway.service.stop()
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.settings(**PAIRS)
async def test_pairs_and_ranks(ring, client):
    body = {"query": "q", "documents": ["b", "aaa", "a"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = (await client.post(path, json=body)).json()
        assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [(1, 3), (2, 1), (0, 0)]
    texts = (await client.post("/rerank", json={"query": "q", "texts": ["b", "a"]})).json()
    assert texts == [{"index": 1, "score": 1}, {"index": 0, "score": 0}]
    scores = (await client.post("/score", json={"text_1": "aa", "text_2": ["b", "a"]})).json()
    assert [one["score"] for one in scores["data"]] == [2, 3]
    assert ring.seen.prepares[-1].seconds == ["b", "a"]
    assert {submit.spec.second_from for submit in ring.seen.submits[-2:]} == {2}


async def test_names_and_counts(ring, client):
    answer = await client.post("/v1/embeddings", json={"input": ["abc", "b"], "request_id": "mine", "odd": 1})
    body = answer.json()
    assert answer.headers["x-request-id"] == "mine"
    assert body["id"] == answer.headers["x-kvmesh-request-id"]
    assert body["id"].startswith("embd-")
    assert (body["object"], body["model"], body["usage"]) == ("list", "bytes", {"prompt_tokens": 4, "total_tokens": 4})
    metrics = ring.gateway.ctx.metrics
    assert metrics.value("mesh_http_requests_total", route="/v1/embeddings", status="200") == 1
    assert metrics.value("mesh_http_unknown_fields_total") == 1


def test_a_model_without_a_pooling_says_what_to_do():
    async def ask(ring, client):
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_pooling")
        assert "/v1/embeddings" not in json.loads((await client.get("/openapi.json")).content)["paths"]

    play(ask, pooling=None)
