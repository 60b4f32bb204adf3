"""Prompts in answers over a real port: echoed, and how likely their tokens were."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from nodes.asks.edits import RowReads
from nodes.asks.logprobs import MalformedPayload
from nodes.gateway.answers.prompt_details import PromptDetails, offsets_in
from nodes.gateway.config import GatewayConfig
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.requests.events import End
from nodes.gateway.requests.outputs import CallOutput, Generation
from nodes.prompt_payloads import PromptPayloads
from tests.nodes.gateway.fake_ring import logprob_of
from tests.nodes.gateway.test_logprobs import IDS, TEXT, entry, joined, likely, shown

BODY = {"prompt": TEXT, "max_tokens": 3, "logprobs": 2, "echo": True}


async def answer(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> Any:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    chunks = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def of_prompt(top: int, ids: list[int] = IDS) -> list[Any]:
    """`top_logprobs` of a prompt."""
    found: list[Any] = [None]
    for at, token_id in enumerate(ids[1:], 1):
        names: dict[str, float] = {}
        for one in (token_id, *likely(token_id, top)):
            names.setdefault(entry(at, one)["token"], shown(logprob_of(at, one)))
        found.append(names)
    return found


async def test_an_echo_is_prompt_then_output(ring: Any, client: httpx.AsyncClient) -> None:
    (choice,) = (found := await answer(client, **BODY))["choices"]
    assert choice["text"] == TEXT + "gr\ufffd"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [entry(0, one)["token"] for one in [*IDS, *IDS[:3]]]
    expected = [None, *(shown(logprob_of(at, one)) for at, one in enumerate(IDS[1:], 1))]
    assert logprobs["token_logprobs"] == expected + [shown(logprob_of(at, one)) for at, one in enumerate(IDS[:3])]
    assert logprobs["top_logprobs"][: len(IDS)] == of_prompt(2)
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8, 9, 10]
    assert found["usage"]["completion_tokens"] == 3
    assert ring.seen.submits[0].prefill == ""


async def test_an_echo_of_ids_is_their_text(ring: Any, client: httpx.AsyncClient) -> None:
    found = await answer(client, prompt=[[97, 98], [99]], echo=True, logprobs=0, max_tokens=1, n=2)
    assert [one["text"] for one in found["choices"]] == ["aba", "abb", "cc", "cc"]
    assert [one["logprobs"]["tokens"] for one in found["choices"]] == [list("aba"), list("abb"), *[["c", "c"]] * 2]
    assert [one["logprobs"]["token_logprobs"][1] for one in found["choices"][:2]] == [logprob_of(1, 98)] * 2


async def test_without_logprobs_nothing_is_read(ring: Any, client: httpx.AsyncClient) -> None:
    (choice,) = (await answer(client, prompt="ab", echo=True, max_tokens=1))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("aba", None)
    assert not ring.seen.submits[0].spec.sampling.asks
    (choice,) = (await answer(client, prompt="ab", echo=False, logprobs=0, max_tokens=1))["choices"]
    assert choice["text"] == "a"


@pytest.mark.parametrize("stream", [False, True])
async def test_no_output_is_one_that_nobody_sees(ring: Any, client: httpx.AsyncClient, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    found = await answer(client, **BODY | {"max_tokens": 0, "stream": stream} | options)
    usage = found.pop()["usage"] if stream else found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS), 0)
    choice = joined(found) if stream else found["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert choice["logprobs"]["top_logprobs"] == of_prompt(2)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 2, "prompt": ["abc", "x"]}, {"logprobs": None}])
async def test_a_streamed_echo_joins_to_the_whole(ring: Any, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = BODY | {"seed": 1, "return_token_ids": True} | fields
    whole, chunks = await answer(client, **body), await answer(client, stream=True, **body)
    for choice in whole["choices"]:
        stream = joined(chunks, choice["index"])
        assert (stream["text"], stream["token_ids"]) == (choice["text"], choice["token_ids"])
        assert stream["logprobs"] == (choice["logprobs"] or {})
        first = next(one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"])
        assert choice["text"].startswith(first["text"])
        assert first["prompt_token_ids"] == choice["prompt_token_ids"]


async def test_prompt_logprobs_as_at_vllm(ring: Any, client: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 2, "max_tokens": 1}
    found = await answer(client, "/v1/chat/completions", **chat)
    first, second = found["prompt_logprobs"]
    assert first is None
    assert second == {
        str(one): {"logprob": shown(logprob_of(1, one)), "rank": max(rank, 1), "decoded_token": entry(1, one)["token"]}
        for rank, one in enumerate((98, *likely(98, 2)[1:]), 1)
    }
    found = await answer(client, prompt=["ab", "c"], prompt_logprobs=0, max_tokens=0)
    assert [len(one["prompt_logprobs"]) for one in found["choices"]] == [2, 1]
    assert [one["text"] for one in found["choices"]] == ["", ""]
    assert "prompt_logprobs" not in (await answer(client, **BODY))["choices"][0]


async def test_what_is_lost_is_told_again_and_a_later_attempt_reads_the_rest(
    ring: Any, client: httpx.AsyncClient
) -> None:
    undisturbed = (await answer(client, **BODY))["choices"]
    ring.faults.drop_reads = 2
    assert (await answer(client, **BODY))["choices"] == undisturbed
    assert ring.seen.resends[-1].streams[0].prompt_position == 1
    ring.faults.failing_attempts = 1
    assert (await answer(client, **BODY))["choices"] == undisturbed
    assert [one.prompt_position for one in ring.seen.submits[-2:]] == [1, len(IDS)]


async def test_a_client_that_leaves_while_its_prompt_is_read(ring: Any, client: httpx.AsyncClient) -> None:
    ring.faults.silent = True
    ring.faults.drop_reads = 100
    asking = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
    await asyncio.sleep(0.1)
    asking.cancel()
    while not ring.gateway.service.core.is_idle:
        await asyncio.sleep(0.01)


def test_payloads_are_taken_once_and_in_order() -> None:
    one = PromptPayloads(1, 6)
    assert not one.add(2, 1, b"bb")
    assert one.add(1, 2, b"aabb")
    assert one.add(1, 3, b"aabbcc")
    assert one.add(2, 1, b"bb")
    assert (one.next, one.since(2), one.is_whole) == (4, b"bbcc", False)
    for wrong in ((4, 1, b"ddd"), (4, 2, b"ddd"), (4, 3, b"ddeeff"), (0, 1, b"xx"), (4, 0, b""), (5, 1, b"ee")):
        assert not one.add(*wrong)
    assert one.add(4, 2, b"ddee")
    assert one.is_whole
    assert PromptPayloads(1, 1).is_whole
    assert PromptPayloads(6, 6).is_whole


def test_offsets_are_those_of_the_prompt_s_text() -> None:
    assert offsets_in("a b", [b"<s>", b"a", b" b"]) == [0, 0, 1]
    assert offsets_in("a b", [b" a", b" b"]) == [0, 1]
    assert offsets_in("\U0001f98ab", [b"\xf0\x9f", b"\xa6\x8a", b"b"]) == [0, 0, 1]


def test_a_worker_that_reads_something_else_is_found_out() -> None:
    request: Any = SimpleNamespace(request_id="r", prompt_ids=[1, 2, 3])
    output = CallOutput(1, whole=True, samples_per_read=1)
    job = Validator(GatewayConfig(model_name="m", context_length=100)).text(
        b'{"prompt": "x", "prompt_logprobs": 0}', "c"
    )
    assert job.tokens.prompt_reads == RowReads(0)
    output.deliver_prompt(0, bytes(8))
    with pytest.raises(MalformedPayload):
        PromptDetails(job, Generation([request], output, 1)).read(0, 0)


def test_samples_wait_for_what_the_first_one_reads() -> None:
    output = CallOutput(3, whole=False, samples_per_read=3)
    output.deliver(1, "b", 1)
    output.end(2, End("r", "stop", None, 1, 1, 0, 0.0))
    assert output.take() == []
    output.deliver_prompt(0, b"")
    assert [(piece.number, piece.text) for piece in output.take()] == [(1, "b"), (2, "")]
    output.deliver(0, "a", 1)
    assert [piece.number for piece in output.take()] == [0]
