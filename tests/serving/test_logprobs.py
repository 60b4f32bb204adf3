"""Logprobs through real meshes with the bundled model: those of transformers, streamed as whole, and over a death."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.conftest import APART, MIXED

TINY = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny"

pytestmark = [pytest.mark.process, pytest.mark.clients]

MESSAGES: Any = [{"role": "user", "content": "What color is the sky?"}]
TOP = 5


# A mesh of the other kind gives the same text (`test_same_text.py`), and is asked in `make test-all`.
@pytest.fixture(params=[APART, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["disaggregated", "mixed"])
def mesh(request: pytest.FixtureRequest, mesh_of: Any) -> Any:
    return mesh_of(*request.param)


@pytest.fixture
def client(mesh: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def expected(model: Any, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """Logprobs of the whole vocabulary at each output token: float32[tokens, vocabulary]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    return torch.log_softmax(logits[len(prompt_ids) - 1 : -1].float(), dim=-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chat_s_are_those_of_transformers(client: openai.OpenAI, model: Any, temperature: float) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=temperature,
        seed=3,
        logprobs=True,
        top_logprobs=TOP,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "logprob_token_ids": [5]},
    )
    choice: Any = answer.choices[0]
    assert choice.finish_reason == "stop"
    ids = choice.token_ids
    rows = expected(model, answer.prompt_token_ids, ids)  # type: ignore[attr-defined]
    content = choice.logprobs.content
    assert [one.token for one in content] == [f"token_id:{token_id}" for token_id in ids[:-1]], "without the end"
    assert b"".join(bytes(one.bytes) for one in content).decode() == choice.message.content
    for one, row, token_id in zip(content, rows, ids, strict=False):
        assert one.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        tops = [(int(top.token.removeprefix("token_id:")), top.logprob) for top in one.top_logprobs]
        named = [logprob for top_id, logprob in tops if top_id == 5]
        assert named == [pytest.approx(row[5].item(), abs=1e-4)]
        assert [logprob for _, logprob in tops[:TOP]] == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-4)
        assert all(logprob == pytest.approx(row[top_id].item(), abs=1e-4) for top_id, logprob in tops)


def test_a_completion_s_are_those_of_transformers(client: openai.OpenAI, model: Any) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="The sky is",
        temperature=0,
        max_tokens=12,
        logprobs=TOP,
        extra_body={"return_token_ids": True},
    )
    choice: Any = answer.choices[0]
    rows = expected(model, choice.prompt_token_ids, choice.token_ids)
    found = choice.logprobs
    assert found.token_logprobs == pytest.approx(
        [row[token_id].item() for row, token_id in zip(rows, choice.token_ids, strict=True)], abs=1e-4
    )
    for row, top, drawn in zip(rows, found.top_logprobs, found.token_logprobs, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-4)
        assert drawn in top.values()
    assert [
        choice.text[at:][: len(token)] for at, token in zip(found.text_offset, found.tokens, strict=True)
    ] == found.tokens


def asked(**fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "temperature": 0.8,
        "seed": 11,
        "n": 2,
        "max_tokens": 400,
        "logprobs": True,
        "top_logprobs": TOP,
    }
    return body | fields


def whole(client: openai.OpenAI, **fields: Any) -> list[Any]:
    answer = client.chat.completions.create(**asked(**fields))
    return [(choice.message.content, choice.logprobs.content) for choice in answer.choices]


def streamed(client: openai.OpenAI, chunks: Any, num: int = 2) -> list[Any]:
    texts, contents = [""] * num, [[] for _ in range(num)]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            contents[choice.index] += choice.logprobs.content if choice.logprobs else []
    return list(zip(texts, contents, strict=True))


@pytest.mark.parametrize("fields", [{}, {"stop": ["e", "q"]}, {"ignore_eos": True, "max_tokens": 60}], ids=str)
def test_a_stream_joins_to_the_whole(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    extra = {"extra_body": {"ignore_eos": True}} if fields.pop("ignore_eos", None) else {}
    one = whole(client, **fields, **extra)
    assert streamed(client, client.chat.completions.create(**asked(stream=True, **fields, **extra))) == one


def test_a_worker_s_death_changes_no_logprob(mesh: Any, client: openai.OpenAI) -> None:
    fields: Any = {"extra_body": {"ignore_eos": True}, "max_tokens": 400}
    undisturbed = whole(client, **fields)
    # The last one decodes, in either kind of mesh.
    worker = [actor for actor in mesh.ps() if actor["role"] == "worker"][-1]
    assert "prefill" not in worker["actor_id"]
    chunks = client.chat.completions.create(**asked(stream=True, **fields))
    first = [next(chunks) for _ in range(20)]
    os.kill(worker["pid"], signal.SIGKILL)
    assert streamed(client, [*first, *chunks]) == undisturbed
    (now,) = (actor for actor in mesh.ps() if actor["actor_id"] == worker["actor_id"])
    assert now["pid"] != worker["pid"], "it was replaced before the stream ended"


def test_of_the_processed_distribution_if_the_mesh_says_so(mesh_of: Any, model: Any) -> None:
    # Last: a third mesh ends one of the two that all others ask.
    mesh = mesh_of(*MIXED, "--logprobs-of", "processed")
    fields = {"temperature": 0.5, "logit_bias": {"7": 3}, "logprobs": 0, "logprob_token_ids": [7, 9]}
    body = {"prompt": "The sky is", "max_tokens": 5, "return_token_ids": True, "seed": 1} | fields
    status, answer = mesh.post("/v1/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    raw = expected(model, choice["prompt_token_ids"], choice["token_ids"])
    raw[:, 7] += 3
    rows = torch.log_softmax(raw / 0.5, dim=-1)
    found = [row[token_id].item() for row, token_id in zip(rows, choice["token_ids"], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(found, abs=1e-4)
    for row, top in zip(rows, choice["logprobs"]["top_logprobs"], strict=True):
        assert {round(value, 3) for value in top.values()} >= {round(row[one].item(), 3) for one in (7, 9)}


@pytest.mark.parametrize("length", [1, 12])
def test_where_a_stop_string_ends_the_text_they_end_too(client: openai.OpenAI, length: int) -> None:
    same: dict[str, Any] = {"model": "tiny", "temperature": 0}
    asked = {**same, "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(messages=MESSAGES, **same).choices[0].message.content or ""
    stop = whole[5 : 5 + length]
    chat: Any = client.chat.completions.create(messages=MESSAGES, stop=stop, **asked)
    (choice,) = chat.choices
    text, content = choice.message.content, choice.logprobs.content
    assert (choice.stop_reason, text) == (stop, whole[: whole.index(stop)])
    tokens = [one.token for one in content]
    assert "".join(tokens).startswith(text)
    assert len("".join(tokens[:-1])) < len(text), "none begins where the text has ended"
    # The longer one takes several tokens, which were drawn all the same.
    assert chat.usage.completion_tokens == len(choice.token_ids) >= len(tokens) + (length > 1)
    stream: Any = client.chat.completions.create(messages=MESSAGES, stop=stop, stream=True, **asked)
    chunks = [chunk.choices[0] for chunk in stream]
    told = [one.token for chunk in chunks if chunk.logprobs is not None for one in chunk.logprobs.content]
    assert told == tokens
    assert [one for chunk in chunks for one in getattr(chunk, "token_ids", None) or ()] == choice.token_ids
    response: Any = client.responses.create(
        input=MESSAGES, include=["message.output_text.logprobs"], extra_body={"stop": stop}, **same
    )
    (part,) = response.output[0].content
    assert (part.text, [one.token for one in part.logprobs]) == (text, tokens)
    plain: Any = client.completions.create(prompt="What color is", max_tokens=20, **same)
    stop = plain.choices[0].text[5 : 5 + length]
    completion: Any = client.completions.create(
        prompt="What color is", max_tokens=20, stop=stop, logprobs=0, extra_body={"return_token_ids": True}, **same
    )
    (choice,) = completion.choices
    assert choice.stop_reason == stop
    assert all(offset < len(choice.text) for offset in choice.logprobs.text_offset)
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    assert completion.usage.completion_tokens == len(choice.token_ids) >= len(choice.logprobs.tokens) + (length > 1)
