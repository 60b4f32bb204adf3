"""Vectors of published models over HTTP: those of sentence-transformers and transformers, in the same order."""

import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from tests.process.conftest import wait_until
from tests.real_models.folders import folder_of
from tests.real_models.texts import PROMPTS
from tests.serving.conftest import RunningMesh, start_mesh

pytestmark = [pytest.mark.real_models, pytest.mark.process, pytest.mark.timeout(600)]

MINILM, SMOLLM2 = "all-minilm-l6-v2", "smollm2-135m-instruct"
ABOUT = [
    [
        "A cat sleeps on the warm windowsill.",
        "The kitten naps where the sun shines.",
        "Felines rest for most of a day.",
    ],
    ["The train to Berlin leaves at noon.", "Departure of the Berlin express: 12:00.", "We missed the railway again."],
    ["Bake the bread for forty minutes.", "The loaf stays in the oven until it is brown.", "Yeast makes dough rise."],
    ["Interest rates rose by half a percent.", "The central bank made credit dearer.", "Inflation eats our savings."],
    ["The striker scored in extra time.", "A late goal decided the final.", "Fans sang long after the match."],
    ["Restart the router and try again.", "The network was down all morning.", "Packets were lost on the link."],
    ["Rain is expected over the hills.", "Bring an umbrella, it will be wet.", "A drought has emptied the lake."],
    ["The violin sonata moved everyone to tears.", "She plays chamber music on Sundays.", "Guitars need tuning."],
    ["Photosynthesis turns light into sugar.", "Leaves make food from sunshine.", "Roots take up water."],
    ["The court dismissed the appeal.", "Judges upheld the earlier verdict.", "A contract needs two signatures."],
]
"""Three sentences about each of ten things, the first two closer to each other."""
SENTENCES = [sentence for group in ABOUT for sentence in group]
PAIRS = random.Random(7).sample([*itertools.combinations(SENTENCES, 2)], 200)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    with start_mesh(tmp_path_factory.mktemp("mesh") / "up.log", "--model", str(folder_of(MINILM))) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    return SentenceTransformer(str(folder_of(MINILM)), device="cpu")


def embedded(mesh: RunningMesh, texts: list[str], **fields: Any) -> Any:
    status, answer = mesh.post("/v1/embeddings", {"input": texts, **fields})
    assert status == 200, answer
    return np.array([one["embedding"] for one in answer["data"]])


def computed(mesh: RunningMesh) -> float:
    return sum(value for name, value in mesh.metrics().items() if name.startswith("mesh_scheduler_computed_tokens"))


def test_embeddings_are_those_of_sentence_transformers(minilm: RunningMesh, reference: SentenceTransformer) -> None:
    texts = [*SENTENCES, *(text[:600] for text in PROMPTS.values())]
    np.testing.assert_allclose(embedded(minilm, texts), reference.encode(texts), atol=1e-4)


def test_pairs_are_in_the_order_of_sentence_transformers(minilm: RunningMesh, reference: SentenceTransformer) -> None:
    body = {"text_1": [one for one, _ in PAIRS], "text_2": [other for _, other in PAIRS]}
    status, answer = minilm.post("/score", body)
    assert status == 200, answer
    scores = [one["score"] for one in answer["data"]]
    left, right = (reference.encode([pair[at] for pair in PAIRS]) for at in (0, 1))
    expected = (left * right).sum(axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    # Numbers of float32: two scores less than a millionth apart have no order.
    assert np.diff(np.array(scores)[np.argsort(expected)]).min() > -1e-6


def test_what_is_cut_is_cut_as_there(minilm: RunningMesh, reference: SentenceTransformer) -> None:
    """To what the folder says, to less, and never to the marks around a text alone."""
    text = " ".join(SENTENCES * 3)
    expected = reference.encode(text)
    for fields in (
        {"truncate": "END"},
        {"truncate": True},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 256},
    ):
        np.testing.assert_allclose(embedded(minilm, [text], **fields)[0], expected, atol=1e-4)
    longest, reference.max_seq_length = reference.max_seq_length, 3
    np.testing.assert_allclose(embedded(minilm, [text], truncate_prompt_tokens=3)[0], reference.encode(text), atol=1e-4)
    reference.max_seq_length = longest
    tail = embedded(minilm, [text], truncate="START")[0]
    assert np.abs(tail - expected).max() > 1e-2
    for path, name, body in (
        ("/v1/embeddings", "input", {"truncate": "END"}), ("/embed", "inputs", {}), ("/encode", "text", {}),
    ):  # fmt: skip
        for most, param in (
            (0, "truncate_prompt_tokens"),
            (1, "truncate_prompt_tokens"),
            (2, "truncate_prompt_tokens"),
        ):
            status, answer = minilm.post(path, {name: text, "truncate_prompt_tokens": most} | body)
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "invalid_value")
    assert "adds 2 to a text: give at least 3" in answer["error"]["message"]
    status, answer = minilm.post("/v1/embeddings", {"input": text, "truncate": "NONE"})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


PROMPTED = [
    {"prompts": {"query": "Find what answers: ", "document": "A text: "}, "default_prompt_name": "query"},
    {"prompts": {"query": "Find what answers: ", "plain": "Say: "}, "default_prompt_name": "plain"},
]


@pytest.mark.parametrize("prompts", PROMPTED)
def test_prompts_are_those_of_sentence_transformers(prompts: Any, tmp_path: Path) -> None:
    folder = tmp_path / "prompted"
    shutil.copytree(folder_of(MINILM), folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    reference = SentenceTransformer(str(folder), device="cpu")
    with start_mesh(tmp_path / "up.log", "--model", str(folder)) as mesh:
        for kinds, encode in (
            (("query", "search_query"), reference.encode_query),
            (("passage", "document", "search_document"), reference.encode_document),
        ):
            for kind in kinds:
                np.testing.assert_allclose(embedded(mesh, SENTENCES, input_type=kind), encode(SENTENCES), atol=1e-4)
        np.testing.assert_allclose(embedded(mesh, SENTENCES), reference.encode(SENTENCES), atol=1e-4)
        for name in prompts["prompts"]:
            expected = reference.encode(SENTENCES, prompt_name=name)
            np.testing.assert_allclose(embedded(mesh, SENTENCES, prompt_name=name), expected, atol=1e-4)


def test_a_hundred_documents_are_ranked_in_one_call(minilm: RunningMesh, reference: SentenceTransformer) -> None:
    query, documents = "pets that like to sleep", [f"{SENTENCES[at % 30]} Note {at}." for at in range(100)]
    status, answer = minilm.post("/rerank", {"query": query, "documents": documents, "top_n": 10})
    assert status == 200, answer
    expected = reference.encode(documents) @ reference.encode(query)
    assert [one["index"] for one in answer["results"]] == np.argsort(-expected)[:10].tolist()
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(np.sort(expected)[:-11:-1], abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean,normalize"])
def test_a_model_that_makes_text_too(pooling: str, tmp_path: Any) -> None:
    """The states of transformers, in float32; and the same bits when the worker that makes them is killed."""
    texts = [*PROMPTS.values()]
    folder = folder_of(SMOLLM2)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    options = ("--dtype", "float32", "--context-length", "4096", "--kv-memory", "512MiB", "--pooling", pooling)
    with start_mesh(tmp_path / "up.log", "--model", str(folder), *options) as mesh:
        found = embedded(mesh, texts)
        [worker] = [one["pid"] for one in mesh.ps() if one["actor_id"] == "worker-prefill-0"]
        before = computed(mesh)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(embedded, mesh, texts)
            wait_until(lambda: computed(mesh) > before, "it computes", 30.0)
            os.kill(worker, signal.SIGKILL)
            assert asked.result().tolist() == found.tolist()
        status, answer = mesh.post("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 4})
        assert (status, bool(answer["choices"][0]["text"])) == (200, True)
    for text, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
        expected = states[-1] if pooling == "last" else torch.nn.functional.normalize(states.mean(0), dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4 * max(1.0, float(expected.abs().max())))
