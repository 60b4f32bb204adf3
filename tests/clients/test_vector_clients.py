"""Clients of other people that ask for vectors and ranks, against `tiny` with a pooling, prefill and decode apart.

What they do is in `vectors.py`, in an environment of their own; what they are told is compared with the answer itself.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.environments import python_with
from tests.serving.conftest import RunningMesh, start_mesh

pytestmark = [pytest.mark.process, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]

MESH = ("--model", "tiny", "--pooling", "mean,normalize", "--prefill", "1", "--decode", "1")
PACKAGES = (
    "openai==3.57.0", "langchain-openai==1.7.4", "litellm==1.110.2", "cohere==6.1.0",
    "llama-index-embeddings-openai-like==0.4.0", "llama-index-postprocessor-cohere-rerank==0.10.0",
)  # fmt: skip
QUERY = "Ann has 3 red apples."
DOCUMENTS = ("Bob has 7 green pears.", "Ann has 4 red apples.", "What is the weather in Rome?", "x = 3")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    with start_mesh(tmp_path_factory.mktemp("mesh") / "up.log", *MESH) as mesh:
        yield mesh


def test_clients_get_what_the_routes_answer(mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> None:
    python = python_with(tmp_path_factory.mktemp("python"), PACKAGES)
    script = str(Path(__file__).parent / "vectors.py")
    # Without it litellm looks for prices on the internet first.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [python, script, mesh.url, QUERY, *DOCUMENTS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])

    def post(path: str, **body: Any) -> Any:
        return httpx.post(mesh.url + path, json=body, timeout=60).raise_for_status().json()

    vectors = [one["embedding"] for one in post("/v1/embeddings", input=DOCUMENTS)["data"]]
    assert {len(vector) for vector in vectors} == {len(vectors[0])}
    for client, found in told["vectors"].items():
        assert found == vectors, client
    results = post("/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    ranks = [[one["index"], one["relevance_score"]] for one in results]
    assert ranks[0][0] == 1, "the sentence that differs in one number is the nearest"
    for client, found in told["ranks"].items():
        assert found == ranks, client
    assert "check_embedding_ctx_length=False" in told["foreign ids"]
