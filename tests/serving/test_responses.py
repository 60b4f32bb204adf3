"""/v1/responses on a whole mesh with a model: streamed and whole, a worker killed midway, conversations kept."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from tests.nodes.gateway.surfaces.openai_events import events_of, story

pytestmark = pytest.mark.process

QUESTION = "What is 3 plus 4?"
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 20, "maxItems": 20}
ADD = {
    "type": "function", "name": "add", "strict": True, "parameters": {
        "type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"], "additionalProperties": False,
    },
}  # fmt: skip
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
}}  # fmt: skip
NOTE = {"type": "custom", "name": "note", "description": "Notes."}


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    return mesh_of(
        "--model", "tiny", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0", "--gateways", "2",
        "--responses-store", "1MiB",
    )  # fmt: skip


@pytest.fixture
def client(mesh: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def streamed(mesh: Any, victim: int = 0, **body: Any) -> list[dict[str, Any]]:
    """The events of one call; with a victim, that process is killed once there is some output."""
    data = b""
    with httpx.stream("POST", mesh.url + "/v1/responses", json={**body, "stream": True}, timeout=60) as answer:
        for piece in answer.iter_bytes():
            data += piece
            if victim and b".delta" in data:
                os.kill(victim, signal.SIGKILL)
                victim = 0
    assert not victim, "it was killed before the stream ended"
    return events_of(data)


def decode_worker(mesh: Any) -> int:
    (pid,) = (one["pid"] for one in mesh.ps() if one["role"] == "worker" and "decode" in one["actor_id"])
    return pid


def without_ids(output: list[Any]) -> str:
    return json.dumps([item.to_dict() | {"id": "", "call_id": "", "parsed_arguments": None} for item in output])


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "input": QUESTION, "temperature": 0}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        last = stream.get_final_response()
    assert whole.output_text == last.output_text != ""
    assert whole.usage is not None
    assert last.usage is not None
    assert whole.usage.output_tokens == last.usage.output_tokens
    assert client.responses.retrieve(last.id).output_text == whole.output_text


@pytest.mark.parametrize("tool", [ADD, NOTE], ids=["function", "custom"])
def test_calls_with_a_worker_killed_midway(mesh: Any, client: openai.OpenAI, tool: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "model": "tiny", "input": QUESTION, "tools": [tool], "tool_choice": "required", "max_output_tokens": 300,
        "parallel_tool_calls": False,
    }  # fmt: skip
    # The longest of a few: what a custom tool gets may be short, and be there before anybody is killed.
    many = [streamed(mesh, **body, seed=seed) for seed in range(6)]
    quiet = max(many, key=lambda events: events[-1]["response"]["usage"]["output_tokens"])
    fields: Any = {**body, "extra_body": {"seed": many.index(quiet)}}
    whole = client.responses.create(**fields)
    assert len(whole.output) == 1, whole.output
    call: Any = whole.output[0]
    assert call.type == {"function": "function_call", "custom": "custom_tool_call"}[tool["type"]]
    if tool is ADD:
        assert len(json.loads(call.arguments)["numbers"]) == 20
    with client.responses.stream(**fields) as stream:
        *_, last = stream
    assert without_ids(last.response.output) == without_ids(whole.output)
    killed = streamed(mesh, decode_worker(mesh), **body, seed=many.index(quiet))
    assert story(killed) == story(quiet)


def test_text_with_a_worker_killed_midway(mesh: Any) -> None:
    body = {"input": QUESTION, "seed": 7, "temperature": 1, "ignore_eos": True, "max_output_tokens": 300}
    quiet = streamed(mesh, **body)
    for _ in range(2):
        assert story(streamed(mesh, decode_worker(mesh), **body)) == story(quiet)


def test_an_agent_s_loop(client: openai.OpenAI) -> None:
    question = "What is the weather in Rome?"
    fields: Any = {"model": "tiny", "tools": [WEATHER], "temperature": 0}
    first = client.responses.create(input=question, **fields)
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    assert kept.output_text == "Weather in Rome: sunny"
    sent: Any = [{"role": "user", "content": question}, *(item.to_dict() for item in first.output), result]
    again = client.responses.create(input=sent, **fields)
    assert again.output_text == kept.output_text
    assert again.usage is not None
    assert kept.usage is not None
    assert again.usage.input_tokens == kept.usage.input_tokens


def test_twenty_turns_with_tools_are_read_from_the_cache(client: openai.OpenAI) -> None:
    shares: list[float] = []
    previous: str | None = None
    for turn in range(20):
        call = {"type": "function_call", "call_id": f"c{turn}", "name": "weather", "arguments": '{"city":"Rome"}'}
        result = {"type": "function_call_output", "call_id": f"c{turn}", "output": "sunny"}
        items: Any = [call, result] if turn else [{"role": "user", "content": "Go."}]
        answer = client.responses.create(
            model="tiny", instructions="Do what you are asked. " * 80, input=items, previous_response_id=previous,
            tools=[WEATHER], max_output_tokens=4, temperature=0,
        )  # fmt: skip
        previous, usage = answer.id, answer.usage
        assert usage is not None
        shares.append(usage.input_tokens_details.cached_tokens / usage.input_tokens)
    assert min(shares[1:]) >= 0.9, shares


def test_a_conversation_survives_one_of_two_gateways(mesh: Any) -> None:
    def ask(number: int, previous: str | None = None) -> dict[str, Any]:
        # A connection each: the kernel deals them out among the gateways.
        body = {"input": f"{number}", "max_output_tokens": 4, "previous_response_id": previous}
        while True:
            try:
                answer = httpx.post(mesh.url + "/v1/responses", json=body, timeout=60)
            except httpx.TransportError:
                # The kernel had given it to the one that died.
                time.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            return answer.json()

    last = ask(0)
    gateways = [one["pid"] for one in mesh.ps() if one["role"] == "gateway"]
    assert len(gateways) == 2
    for number in range(1, 10):
        if number in (3, 6):
            os.kill(gateways[number // 6], signal.SIGKILL)
        before, last = last, ask(number, last["id"])
        assert last["usage"]["input_tokens"] > before["usage"]["input_tokens"]
    with ThreadPoolExecutor(4) as pool:
        assert len({one["id"] for one in pool.map(ask, range(8), [last["id"]] * 8)}) == 8
