"""/v1/messages and what is below it over a real port, with a ring of bytes behind it, by the `anthropic` package."""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from nodes.gateway.calls import event_stream
from tests.nodes.gateway.messages.anthropic_events import events_of, message_of, whole_message

TEXT = "what a client says"
MESSAGES: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture
def client(served: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client
    deadline = time.monotonic() + 5
    while not served.is_idle:
        assert time.monotonic() < deadline, "something is held"
        time.sleep(0.01)


def post(served: Any, path: str = "/v1/messages?beta=true", **fields: Any) -> httpx.Response:
    body = {"model": "bytes", "max_tokens": 40, "messages": MESSAGES} | fields
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27", "x-app": "cli"}
    return httpx.post(served.url + path, json=body, headers=headers, verify=False)


def test_whole_and_streamed(served: Any, client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="bytes", max_tokens=40, messages=MESSAGES)
    assert message.content[0].model_dump(exclude_none=True) == {"type": "text", "text": TEXT}
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "bytes")
    assert message.id.startswith("msg_")
    usage = {
        "input_tokens": len(TEXT) - len(TEXT) // 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": len(TEXT) // 2,
        "output_tokens": len(TEXT) + 1,
    }
    assert message.usage.model_dump(exclude_none=True) == usage
    with client.messages.stream(model="bytes", max_tokens=40, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().usage.model_dump(exclude_none=True) == usage
    whole = whole_message(post(served).content)
    events = events_of(post(served, stream=True).content)
    assert events[0].message.usage.input_tokens == len(TEXT)
    assert message_of(events) | {"id": ""} == whole | {"id": ""}


def test_the_package_finds_the_request_s_name(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="bytes", max_tokens=40, messages=MESSAGES)
    assert message._request_id
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="bytes", max_tokens=40, messages=[])
    assert refused.value.request_id == refused.value.body["request_id"]


def test_the_stop_that_matched(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "bytes", "max_tokens": 40, "messages": MESSAGES, "stop_sequences": ["zzz", "client"]}
    message = client.messages.create(**fields)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "client")
    with client.messages.stream(**fields) as stream:
        assert stream.get_final_message().stop_sequence == "client"


def test_the_end_of_tokens_and_of_the_context(served: Any, client: anthropic.Anthropic) -> None:
    assert client.messages.create(model="bytes", max_tokens=3, messages=MESSAGES).stop_reason == "max_tokens"
    served.faults.tokens_per_step = 8
    long: Any = [{"role": "user", "content": "x" * 150}]
    answer = client.messages.create(model="bytes", max_tokens=32_000, messages=long)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("model_context_window_exceeded", 50)
    served.faults.tokens_per_step = 1


def test_no_tokens_fill_the_cache(served: Any) -> None:
    message = whole_message(post(served, max_tokens=0).content)
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message_of(events_of(post(served, max_tokens=0, stream=True).content))["content"] == []


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="bytes", messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == len("Be brief.") + len(TEXT)


def test_attribution_is_no_part_of_the_prompt(served: Any) -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.154; cch=1;"}
    body = {"system": [line, {"type": "text", "text": "Be brief."}]}
    assert post(served, "/v1/messages/count_tokens", **body).json() == {"input_tokens": len("Be brief.") + len(TEXT)}


def test_errors_are_typed(served: Any, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude-9", max_tokens=4, messages=MESSAGES)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.body["request_id"].startswith("msg_")
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    for call in (client.messages.create, client.messages.count_tokens):
        limit = {} if call == client.messages.count_tokens else {"max_tokens": 4}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.type"):
            call(model="bytes", messages=image, **limit)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="bytes", max_tokens=4, messages=[{"role": "user", "content": "x" * 300}])
    with pytest.raises(anthropic.BadRequestError, match=r"stop_sequences\.0"):
        client.messages.create(model="bytes", max_tokens=4, messages=MESSAGES, stop_sequences=[""])
    with pytest.raises(anthropic.APIStatusError) as large:
        client.messages.create(model="bytes", max_tokens=4, messages=[{"role": "user", "content": "x" * 200_000}])
    assert (large.value.status_code, large.value.body["error"]["type"]) == (413, "request_too_large")
    served.faults.refuse_submits = "overloaded"
    with pytest.raises(anthropic.APIStatusError) as full:
        client.messages.create(model="bytes", max_tokens=4, messages=MESSAGES)
    served.faults.refuse_submits = ""
    assert (full.value.status_code, full.value.body["error"]["type"]) == (529, "overloaded_error")


def test_other_methods_and_paths_answer_in_the_same_form(served: Any) -> None:
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ):
        answer = httpx.request(method, served.url + path, verify=False)
        assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert "type" not in httpx.get(served.url + "/v1/messagesfoo", verify=False).json()
    for path in ("/", "/api/hello"):
        assert httpx.head(served.url + path, verify=False).status_code == 200


def test_a_stream_that_breaks_raises(served: Any, client: anthropic.Anthropic) -> None:
    faults = served.faults
    faults.failing_attempts, faults.fail_after, faults.fail_retryable = 1, 3, False
    faults.fail_code = "poisoned_request"
    # At once, all of it could come before anything was sent: an answer with a status, and no stream.
    faults.step_s = 0.05
    texts: list[str] = []
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(model="bytes", max_tokens=9, messages=MESSAGES) as stream,
    ):
        texts.extend(stream.text_stream)
    assert "".join(texts) == TEXT[:3]
    assert caught.value.body["error"]["type"] == "api_error"
    faults.fail_retryable, faults.fail_code, faults.step_s = True, "worker_lost", 0.0


def test_a_failed_attempt_is_only_a_pause(served: Any) -> None:
    undisturbed = [event for event in events_of(post(served, stream=True).content) if event.type != "message_start"]
    served.faults.failing_attempts, served.faults.fail_after = 1, 3
    disturbed = [event for event in events_of(post(served, stream=True).content) if event.type != "message_start"]
    assert message_events(disturbed) == message_events(undisturbed)


def message_events(events: list[Any]) -> list[str]:
    """As JSON, texts joined: how a text is cut is nobody's promise."""
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    return [text, *(event.model_dump_json() for event in events if event.type != "content_block_delta")]


def test_silence_is_broken_by_pings(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "PING_S", 0.02)
    served.faults.step_s = 0.2
    stream = post(served, stream=True, max_tokens=3).content
    served.faults.step_s = 0.0
    between = stream.partition(b"content_block_start")[2].partition(b"content_block_stop")[0]
    assert between.count(b"event: ping") > 3
    assert message_of(events_of(stream))["content"] == [{"type": "text", "text": TEXT[:3]}]


def test_what_has_no_effect_is_accepted(served: Any) -> None:
    fields = {"metadata": {"user_id": json.dumps({"session_id": "x"})}, "context_management": {"edits": []}}
    assert whole_message(post(served, **fields).content)["content"] == [{"type": "text", "text": TEXT}]
