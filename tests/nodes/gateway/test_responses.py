"""POST /v1/responses on a whole gateway: what the `openai` package gets, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from nodes.protocol import TemplateIs
from tests.nodes.gateway.surfaces.openai_events import events_of, story

TEXT = "what a client says, é"


@pytest.fixture
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def stream_of(served: Any, **body: Any) -> list[dict[str, Any]]:
    answer = httpx.post(served.url + "/v1/responses", json={**body, "stream": True}, timeout=20)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.content)
    assert events[0]["response"]["id"] == events[-1]["response"]["id"] == answer.headers["x-kvmesh-request-id"]
    return events


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="bytes", input=TEXT, instructions="", metadata={"a": "b"}, temperature=0.5)
    assert answer.output_text == TEXT
    assert (answer.status, answer.model, answer.metadata, answer.temperature) == ("completed", "bytes", {"a": "b"}, 0.5)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(TEXT.encode())
    assert answer.usage.input_tokens_details.cached_tokens == len(TEXT.encode()) // 2


def test_a_stream_is_the_whole_answer(client: openai.OpenAI, served: Any) -> None:
    with client.responses.stream(model="bytes", input=TEXT) as stream:
        streamed = stream.get_final_response()
    whole = client.responses.create(model="bytes", input=TEXT)
    assert streamed.output_text == whole.output_text == TEXT
    events = stream_of(served, input=TEXT)
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == TEXT


def test_an_answer_that_is_cut(client: openai.OpenAI, served: Any) -> None:
    whole = client.responses.create(model="bytes", input=TEXT, max_output_tokens=4)
    assert (whole.status, whole.output_text) == ("incomplete", TEXT[:4])
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert stream_of(served, input=TEXT, max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_a_developer_s_word_in_the_middle_may_be_the_user_s(client: openai.OpenAI, served: Any) -> None:
    """Codex says so what has changed in between, and gpt-oss's template shows it at the beginning only."""
    said: Any = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "developer", "user")]
    client.responses.create(model="bytes", input=said)
    assert served.seen.prepares[-1].late_system_as_user
    client.chat.completions.create(model="bytes", messages=said)
    assert not served.seen.prepares[-1].late_system_as_user


def test_strict_parse(client: openai.OpenAI) -> None:
    class City(BaseModel):
        city: str

    fields: Any = {"model": "bytes", "input": '{"city":"Rome"}', "text_format": City}
    parsed = client.responses.parse(**fields).output_parsed
    assert parsed == City(city="Rome")
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_parsed == parsed


def test_logprobs(client: openai.OpenAI) -> None:
    fields: Any = {"model": "bytes", "input": "what", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    message: Any = client.responses.create(**fields).output[0]
    logprobs = message.content[0].logprobs
    assert [one.token for one in logprobs] == list("what")
    assert {len(one.top_logprobs) for one in logprobs} == {2}
    with client.responses.stream(**fields) as stream:
        streamed: Any = stream.get_final_response().output[0]
    assert streamed.content[0].logprobs == logprobs


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input.0.content.0.type", "unsupported_parameter"),
        ({"input": "x" * 300}, "input", "context_length_exceeded"),
        ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "x", "temperature": 3}, "temperature", "invalid_value"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"input": [{"role": "bad", "content": "x"}]}, "input", "template_error"),
        ({"input": "x", "background": True}, "background", "unsupported_parameter"),
        ({"input": "x", "seed": "one"}, "seed", "invalid_value"),
    ],
)  # fmt: skip
def test_errors_name_the_field(client: openai.OpenAI, body: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="bytes", **{"extra_body": {"seed": body.pop("seed", None)}, **body})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_without_a_store_responses_are_not_kept_and_say_so(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="bytes", input="x", store=True)
    assert answer.to_dict()["store"] is False


@pytest.mark.settings(recovery_timeout_s=0.3)
async def test_a_stream_that_fails(ring: Any, client: httpx.AsyncClient) -> None:
    ring.faults.failing_attempts, ring.faults.fail_after, ring.faults.fail_retryable = 1, 3, False
    answer = await client.post("/v1/responses", json={"input": TEXT, "stream": True})
    events = events_of(answer.content)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT[:3]


async def test_a_stream_that_goes_on_elsewhere(ring: Any, client: httpx.AsyncClient) -> None:
    body = {"input": TEXT, "stream": True}
    quiet = events_of((await client.post("/v1/responses", json=body)).content)
    ring.faults.failing_attempts, ring.faults.fail_after = 2, 3
    broken = events_of((await client.post("/v1/responses", json=body)).content)
    assert story(broken) == story(quiet)


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "name": "get", "parameters": PARAMETERS},
    {"type": "custom", "name": "patch", "description": "Edits."},
    {"type": "namespace", "name": "ns", "description": "N.", "tools": [{"type": "function", "name": "read"}]},
    {"type": "web_search"},
]


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


async def asked(ring: Any, client: httpx.AsyncClient, text: str, **body: Any) -> Any:
    """Of a model that writes what it reads, and whose template shows tools."""
    marks = "</think> json object with function name and arguments within <tool_call>"
    ring.tokenizer.template = TemplateIs(template=marks, shows_tools=True)
    answer = await client.post("/v1/responses", json={"input": text, "tools": TOOLS, **body})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (called("get", '{"city":"Rome"}'), [("function_call", "get", None, '{"city":"Rome"}')]),
        (called("patch", '{"input":"*** é\\n\\"x"}'), [("custom_tool_call", "patch", None, '*** é\n"x')]),
        (called("ns__read", "{}"), [("function_call", "read", "ns", "{}")]),
        (f"<think>So.</think>Well.{called('get', '{}')}", [("reasoning", "So."), ("message", "Well."),
         ("function_call", "get", None, "{}")]),
        (called("get", "{}") + called("patch", '{"input":""}'), [("function_call", "get", None, "{}"),
         ("custom_tool_call", "patch", None, "")]),
        (called("other", "{}"), [("message", called("other", "{}"))]),
        (f"A{called('get', '{]')}", [("message", "A"), ("function_call", "get", None, "{"),
         ("message", "]}</tool_call>")]),
    ],
)  # fmt: skip
@pytest.mark.settings(context_length=400)
async def test_calls_whole_and_streamed(
    ring: Any, client: httpx.AsyncClient, text: str, items: list[tuple[Any, ...]]
) -> None:
    def shown(item: dict[str, Any]) -> tuple[Any, ...]:
        if "content" in item:
            return item["type"], item["content"][0]["text"]
        return item["type"], item["name"], item.get("namespace"), item.get("arguments", item.get("input"))

    whole = (await asked(ring, client, text)).json()
    assert list(map(shown, whole["output"])) == items
    events = events_of((await asked(ring, client, text, stream=True)).content)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert list(map(shown, done)) == items


async def test_a_call_and_its_result_come_back_as_messages(ring: Any, client: httpx.AsyncClient) -> None:
    text = "<think>So.</think>Well." + called("ns__read", "{}")
    output = (await asked(ring, client, text)).json()["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "done"}
    await asked(ring, client, text, input=[{"role": "user", "content": "x"}, *output, result])
    messages = json.loads(ring.seen.prepares[-1].chat)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "So."
    assert messages[1]["tool_calls"][0]["function"] == {"name": "ns__read", "arguments": "{}"}
    assert [tool["function"]["name"] for tool in json.loads(ring.seen.prepares[-1].tools)] == [
        "get",
        "patch",
        "ns__read",
    ]


async def test_logprobs_are_of_the_message_alone(ring: Any, client: httpx.AsyncClient) -> None:
    text, include = "<think>So.</think>Well." + called("get", "{}"), ["message.output_text.logprobs"]
    whole = (await asked(ring, client, text, include=include)).json()["output"][1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in whole) == "Well."
    events = events_of((await asked(ring, client, text, include=include, stream=True)).content)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [one for some in deltas for one in some] == whole


async def test_a_template_without_tools_is_refused_by_name(ring: Any, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/responses", json={"input": "x", "tools": TOOLS})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "--chat-template" in answer.json()["error"]["message"]
    assert (await client.post("/v1/responses", json={"input": "x", "tools": TOOLS[-1:]})).status_code == 200


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools.4.name"),
        ({"tool_choice": {"type": "function", "name": "put"}}, "tool_choice"),
        ({"tools": [{"type": "function", "name": f"t{i}"} for i in range(129)]}, "tools"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ],
)
def test_bad_tools(client: openai.OpenAI, field: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="bytes", input="x", **{"tools": TOOLS, **field})
    assert caught.value.param == param
