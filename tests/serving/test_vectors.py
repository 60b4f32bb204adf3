"""The routes for vectors on a whole mesh with a model, prefill and decode apart, and with the worker killed."""

import base64
import json
import os
import signal
import struct
import threading
from typing import Any

import httpx
import pytest

from tests.process.conftest import wait_until

pytestmark = pytest.mark.process

QUERY = "Ann has 3 red apples."
DOCUMENTS = ["Bob has 7 green pears.", "Ann has 4 red apples.", "What is the weather in Rome?"]
MANY = [f"Ann has {number} apples." + " And more." * (number % 20) for number in range(120)]


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    return mesh_of(
        "--model", "tiny", "--pooling", "mean", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0"
    )


def post(mesh: Any, path: str, **body: Any) -> Any:
    answer = httpx.post(mesh.url + path, json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    return answer.json()


def embed(mesh: Any, inputs: Any, **fields: Any) -> list[Any]:
    return [one["embedding"] for one in post(mesh, "/v1/embeddings", input=inputs, **fields)["data"]]


def test_texts_ids_and_forms_agree(mesh: Any) -> None:
    vectors = embed(mesh, DOCUMENTS)
    ids = [post(mesh, "/tokenize", prompt=text)["tokens"] for text in DOCUMENTS]
    assert embed(mesh, ids) == vectors
    encoded = [base64.b64decode(one) for one in embed(mesh, DOCUMENTS, encoding_format="base64")]
    assert [list(struct.unpack(f"<{len(one) // 4}f", one)) for one in encoded] == vectors
    assert post(mesh, "/embed", inputs=DOCUMENTS, normalize=False) == vectors
    assert embed(mesh, DOCUMENTS[0] + " and so on", truncate_prompt_tokens=len(ids[0])) == [vectors[0]]
    short = embed(mesh, DOCUMENTS[0], dimensions=4)[0]
    length = sum(number**2 for number in vectors[0][:4]) ** 0.5
    assert short == pytest.approx([number / length for number in vectors[0][:4]])


def test_ranks_and_scores_agree(mesh: Any) -> None:
    scores = [one["score"] for one in post(mesh, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
    one, *others = embed(mesh, [QUERY, *DOCUMENTS], normalize=True)
    cosines = [sum(a * b for a, b in zip(one, other, strict=True)) for other in others]
    assert scores == pytest.approx(cosines, abs=1e-6)
    results = post(mesh, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [found["index"] for found in results] == sorted(range(3), key=lambda index: -scores[index])
    assert results[0]["document"] == {"text": "Ann has 4 red apples."}
    texts = post(mesh, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert [found["score"] for found in texts] == sorted(scores, reverse=True)


def test_a_death_changes_no_bit(mesh: Any) -> None:
    whole = embed(mesh, MANY, encoding_format="base64")
    pids = {one["actor_id"]: one["pid"] for one in mesh.ps()}
    told: list[Any] = []
    asking = threading.Thread(target=lambda: told.append(embed(mesh, MANY, encoding_format="base64")))
    asking.start()
    wait_until(lambda: json.loads(mesh.get("/load"))["server_load"], "the call is there", 30.0)
    os.kill(pids["worker-prefill-0"], signal.SIGKILL)
    assert not told, "the call was over before anybody died"
    asking.join()
    assert told == [whole]


def test_chats_and_vectors_share_a_mesh(mesh: Any) -> None:
    body = {"prompt": QUERY, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    alone = post(mesh, "/v1/completions", **body)["choices"][0]["text"]
    told: list[Any] = []
    asking = threading.Thread(target=lambda: told.append(embed(mesh, MANY[:60])))
    asking.start()
    assert post(mesh, "/v1/completions", **body)["choices"][0]["text"] == alone
    asking.join()
    assert told == [embed(mesh, MANY[:60])]


def test_what_does_not_fit_is_named(mesh: Any) -> None:
    status, answer = mesh.post("/v1/embeddings", {"input": ["short", "word " * 3000]})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "input.1", "context_length_exceeded")
    status, answer = mesh.post("/v1/embeddings", {"input": [[5], [99_999]]})
    assert (status, answer["error"]["param"]) == (400, "input.1")
    assert "check_embedding_ctx_length=False" in answer["error"]["message"]
    status, answer = mesh.post("/classify", {"input": "a"})
    assert (status, answer["error"]["code"]) == (400, "unsupported_model")
    paths = json.loads(mesh.get("/openapi.json"))["paths"]
    assert "/v1/embeddings" in paths
    assert "/classify" not in paths
