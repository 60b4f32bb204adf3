"""Logprobs and token ids in answers over a real port, streamed and whole, as OpenAI's types read them."""

import asyncio
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from nodes.asks.logprobs import UNLIKELIEST, MalformedPayload
from nodes.gateway.answers.token_details import TextOffsets, TokenDetails
from nodes.gateway.config import GatewayConfig
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.requests.events import Tokens
from nodes.gateway.requests.outputs import CallOutput, Generation
from tests.nodes.gateway.fake_ring import END_OF_TEXT, END_TEXT, FakeTokenizer, logprob_of

TEXT = "grüße 🦊!"
IDS = list(TEXT.encode())


@pytest.fixture
def client(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=10, verify=False) as client:
        yield client
    deadline = time.monotonic() + 5
    while not served.is_idle:
        assert time.monotonic() < deadline, "something is held"
        time.sleep(0.01)


def answer_of(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    for word in ("NaN", "Infinity"):
        assert word not in response.text
    if not body.get("stream"):
        kind: Any = ChatCompletion if "chat" in path else Completion
        kind.model_validate_json(response.text, strict=True)
        return response.json()
    chunks = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    for chunk in chunks:
        if "chat" in path:
            ChatCompletionChunk.model_validate_json(chunk, strict=True)
    return [json.loads(chunk) for chunk in chunks]


def chat(client: httpx.Client, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": TEXT}]} | fields
    return answer_of(client, "/v1/chat/completions", body)


def text(client: httpx.Client, **fields: Any) -> Any:
    return answer_of(client, "/v1/completions", {"prompt": TEXT, "max_tokens": 50} | fields)


def shown(logprob: float) -> float:
    return max(logprob, UNLIKELIEST)


def entry(position: int, token_id: int) -> dict[str, Any]:
    data = END_TEXT if token_id == END_OF_TEXT else bytes([token_id])
    logprob = shown(logprob_of(position, token_id))
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def text_of(logprobs: dict[str, Any]) -> str:
    return b"".join(bytes(one["bytes"]) for one in logprobs["content"]).decode()


def likely(token_id: int, top: int) -> list[int]:
    return [(token_id + 7 * n) % 257 for n in range(top)]


def joined(chunks: list[Any], number: int = 0) -> Any:
    """A streamed choice as a whole one would be."""
    whole: dict[str, Any] = {"text": "", "content": [], "token_ids": [], "finish_reason": None}
    lists: dict[str, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == number):
        whole["text"] += choice["delta"]["content"] if "delta" in choice else choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            if name != "refusal":
                lists.setdefault(name, []).extend(values)
        whole["token_ids"] += choice.get("token_ids", [])
        whole["finish_reason"] = choice["finish_reason"]
    return whole | {"logprobs": lists}


@pytest.mark.parametrize("top", [0, 3, 20])
def test_a_chat_has_the_likeliest_of_each_token_but_the_one_that_ends_it(client: httpx.Client, top: int) -> None:
    choice = chat(client, logprobs=True, top_logprobs=top)["choices"][0]
    assert choice["finish_reason"] == "stop"
    expected = [
        entry(at, token_id) | {"top_logprobs": [entry(at, one) for one in likely(token_id, top)]}
        for at, token_id in enumerate(IDS)
    ]
    assert choice["logprobs"] == {"content": expected, "refusal": None}
    assert text_of(choice["logprobs"]) == choice["message"]["content"] == TEXT


def test_a_chat_cut_by_length_has_them_of_its_last_token_too(client: httpx.Client) -> None:
    choice = chat(client, logprobs=True, max_tokens=3)["choices"][0]
    assert [one["bytes"] for one in choice["logprobs"]["content"]] == [[one] for one in IDS[:3]]
    # With ignore_eos nothing ends an answer but its length, and every token is part of it.
    choice = chat(client, logprobs=True, max_tokens=20, ignore_eos=True)["choices"][0]
    assert len(choice["logprobs"]["content"]) == 20


def test_a_stop_token_is_left_out_of_a_chat(client: httpx.Client) -> None:
    choice = chat(client, logprobs=True, stop_token_ids=[IDS[1]], return_token_ids=True)["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["g"]
    assert choice["token_ids"] == IDS[:2]


def test_a_completion_has_the_drawn_token_beside_the_likeliest_and_the_end(client: httpx.Client) -> None:
    choice = text(client, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    ids = [*IDS, END_OF_TEXT]
    assert logprobs["tokens"] == [entry(0, token_id)["token"] for token_id in ids]
    assert logprobs["tokens"][-1] == END_TEXT.decode()
    assert logprobs["token_logprobs"] == [shown(logprob_of(at, token_id)) for at, token_id in enumerate(ids)]
    for at, token_id in enumerate(ids):
        of_text: dict[str, float] = {}
        for one in (token_id, *likely(token_id, 2)):
            of_text.setdefault(entry(at, one)["token"], shown(logprob_of(at, one)))
        assert logprobs["top_logprobs"][at] == of_text
    # Bytes of one character begin at that character.
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8]
    assert all(len(top) == 1 for top in text(client, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"n": 2, "ignore_eos": True, "max_tokens": 30},
        {"stop": "🦊"},
        {"stop": ["e 🦊!x", "ü"]},
        {"stop": ["zzz", "🦊"], "include_stop_str_in_output": True},
        {"max_tokens": 3},
    ],
)
@pytest.mark.parametrize("ask", [chat, text])
def test_what_is_streamed_joins_to_the_whole(client: httpx.Client, ask: Any, fields: dict[str, Any]) -> None:
    fields = fields | ({"logprobs": True, "top_logprobs": 4} if ask is chat else {"logprobs": 4})
    fields |= {"logprob_token_ids": [0, 255], "return_token_ids": True, "seed": 1}
    whole, chunks = ask(client, **fields), ask(client, stream=True, **fields)
    assert len(whole["choices"]) == fields.get("n", 1)
    for choice in whole["choices"]:
        stream = joined(chunks, choice["index"])
        assert stream["text"] == (choice["message"]["content"] if ask is chat else choice["text"])
        assert stream["finish_reason"] == choice["finish_reason"]
        assert stream["token_ids"] == choice["token_ids"]
        choice["logprobs"].pop("refusal", None)
        assert stream["logprobs"] == choice["logprobs"]


def test_a_logprob_goes_out_with_text_or_the_end(client: httpx.Client) -> None:
    for chunk in chat(client, stream=True, logprobs=True)[1:]:
        (choice,) = chunk["choices"]
        if choice["logprobs"] is not None:
            assert choice["delta"]["content"] or choice["finish_reason"]


def test_named_ids_follow_the_likeliest(client: httpx.Client) -> None:
    content = chat(client, logprobs=True, top_logprobs=1, logprob_token_ids=[IDS[0], 33])["choices"][0]["logprobs"]
    first, second = content["content"][:2]
    assert [one["bytes"] for one in first["top_logprobs"]] == [[IDS[0]], [33]]
    assert [one["bytes"] for one in second["top_logprobs"]] == [[IDS[1]], [IDS[0]], [33]]
    top = text(client, logprobs=0, logprob_token_ids=[33])["choices"][0]["logprobs"]["top_logprobs"]
    assert top[0] == {"g": shown(logprob_of(0, IDS[0])), "!": shown(logprob_of(0, 33))}


def test_ids_in_the_place_of_texts(client: httpx.Client) -> None:
    choice = chat(client, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    names = [f"token_id:{token_id}" for token_id in IDS]
    assert [one["token"] for one in choice["logprobs"]["content"]] == names
    assert [one["top_logprobs"][0]["token"] for one in choice["logprobs"]["content"]] == names
    logprobs = text(client, logprobs=3, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [*names, f"token_id:{END_OF_TEXT}"]
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])


def test_ids_of_output_and_prompt(client: httpx.Client) -> None:
    answer = chat(client, return_token_ids=True, n=2)
    assert answer["prompt_token_ids"] == IDS
    assert answer["choices"][0]["token_ids"] == [*IDS, END_OF_TEXT]
    assert "prompt_token_ids" not in answer["choices"][0]
    chunks = chat(client, return_token_ids=True, n=2, stream=True)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [IDS] + [None] * (len(chunks) - 1)
    answer = text(client, prompt=["ab", "xyz"], return_token_ids=True, max_tokens=2)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97, 98], [120, 121, 122]]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[97, 98], [120, 121]]
    assert "prompt_token_ids" not in answer
    chunks = text(client, prompt=["ab", "xyz"], return_token_ids=True, stream=True)
    prompts = [choice for chunk in chunks for choice in chunk["choices"] if "prompt_token_ids" in choice]
    assert sorted(choice["prompt_token_ids"] for choice in prompts) == [[97, 98], [120, 121, 122]]


def test_the_prompt_s_ids_alone(client: httpx.Client) -> None:
    answer = chat(client, return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == IDS
    assert "token_ids" not in answer["choices"][0]
    answer = text(client, return_prompt_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == IDS
    assert "token_ids" not in answer["choices"][0]


def test_plain_answers_have_nothing_new(client: httpx.Client) -> None:
    keys = {"index", "message", "finish_reason", "logprobs"}
    assert chat(client, logprobs=False, return_token_ids=False)["choices"][0].keys() == keys
    assert text(client)["choices"][0].keys() == {"index", "text", "finish_reason", "logprobs"}


async def test_a_tokenizer_is_asked_once_and_another_if_it_dies(ring: Any, client: httpx.AsyncClient) -> None:
    async def ask() -> Any:
        return await client.post("/v1/completions", json={"prompt": "ab", "logprobs": 0, "max_tokens": 2})

    response = await client.post("/v1/completions", json={"prompt": "ab", "return_token_ids": True})
    assert response.status_code == 200
    assert ring.seen.num_vocabularies == 0, "ids need none"
    ring.faults.vocabulary_silent = True
    first = [asyncio.ensure_future(ask()) for _ in range(5)]
    await asyncio.sleep(0.2)
    assert ring.seen.num_vocabularies == 1
    await ring.kill("tok0")
    ring.faults.vocabulary_silent = False
    await ring.start("tok0", FakeTokenizer(ring.faults, ring.seen))
    assert [response.status_code for response in await asyncio.gather(*first)] == [200] * 5
    assert ring.seen.num_vocabularies == 2
    assert (await ask()).json()["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert ring.seen.num_vocabularies == 2


async def test_a_failed_attempt_changes_no_logprob(ring: Any, client: httpx.AsyncClient) -> None:
    body = {"prompt": TEXT, "logprobs": 2, "max_tokens": 50}
    undisturbed = (await client.post("/v1/completions", json=body)).json()["choices"]
    ring.faults.failing_attempts, ring.faults.fail_after = 3, 2
    assert (await client.post("/v1/completions", json=body)).json()["choices"] == undisturbed


def test_offsets_are_those_of_the_text() -> None:
    offsets = TextOffsets()
    assert [offsets.next(data) for data in (b"a", b"\xf0\x9f", b"\xa6\x8a", b" b", b"", b"c")] == [0, 1, 1, 2, 4, 4]


def test_a_worker_that_reads_nothing_is_found_out() -> None:
    request: Any = SimpleNamespace(request_id="r", prompt_ids=[1])
    generation = Generation([request], CallOutput(1, whole=True), 1)
    job = Validator(GatewayConfig(model_name="m", context_length=100)).text(b'{"prompt": "x", "logprobs": 0}', "c")
    details = TokenDetails(job, generation)
    assert details.drawn(None) == []
    with pytest.raises(MalformedPayload, match="with 1 of 2 tokens"):
        details.drawn(Tokens([1, 2], [bytes(8)]))
