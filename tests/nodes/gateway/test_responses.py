"""POST /v1/responses on a whole gateway: what the `openai` package gets, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

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
