"""The `openai` Python package against a gateway with a ring of bytes behind it: what it does, and how it sees errors.

The same package against whole meshes with models: `tests/serving/`.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from nodes.api_keys.entries import ApiKey, sha256_of
from nodes.api_keys.file import write_key_file
from tests.nodes.gateway.fake_ring import CONFIG, ServedRing

pytestmark = pytest.mark.clients

TEXT = "what a client says"
MESSAGES: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
    deadline = time.monotonic() + 5
    while not served.is_idle:
        assert time.monotonic() < deadline, "something is held"
        time.sleep(0.01)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bytes", "other-bytes"]
    (codex, _) = httpx.get(f"{client.base_url}models").json()["models"]
    # What Codex 0.80 to 0.171 cannot do without: one of them missing, and it knows no model.
    required = {
        "slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api",
        "priority", "base_instructions", "supports_reasoning_summaries", "support_verbosity", "truncation_policy",
        "supports_parallel_tool_calls", "experimental_supported_tools",
    }  # fmt: skip
    assert required <= codex.keys()
    assert (codex["slug"], codex["context_window"], codex["truncation_policy"]["limit"]) == ("bytes", 200, 50)
    assert client.models.retrieve("bytes").owned_by == "kvmesh"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-99")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="bytes", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TEXT)
    assert answer.usage.completion_tokens == len(TEXT) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len(TEXT) // 2
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="bytes", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 2 * len(TEXT) + 1


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="bytes", messages=MESSAGES) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == TEXT


def test_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="bytes", prompt="abc", max_tokens=2)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(model="bytes", prompt="abc", max_tokens=10, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", [["abc", "de"], [[97, 98, 99], [100, 101]]])
def test_several_prompts(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="bytes", prompt=prompt, max_tokens=10)
    assert [choice.text for choice in answer.choices] == ["abc", "de"]


def test_samples(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="bytes", messages=MESSAGES, n=2, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT[:4], TEXT[1:5]]
    texts = ["", ""]
    ends = [None, None]
    for chunk in client.chat.completions.create(model="bytes", messages=MESSAGES, n=2, max_tokens=4, stream=True):
        choice: Any = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
    assert texts == [TEXT[:4], TEXT[1:5]]
    assert ends == ["length", "length"]


@pytest.mark.parametrize("stop", ["client", ["zzz", "client"]])
def test_stop(client: openai.OpenAI, stop: Any) -> None:
    answer = client.chat.completions.create(model="bytes", messages=MESSAGES, stop=stop)
    assert answer.choices[0].message.content == "what a "
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(model="bytes", messages=MESSAGES, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "what a "


def test_logprobs(client: openai.OpenAI) -> None:
    fields: Any = {"model": "bytes", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    logprobs = client.chat.completions.create(**fields).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(one.token for one in logprobs.content) == TEXT
    assert {len(one.top_logprobs) for one in logprobs.content} == {2}
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].logprobs == logprobs
    choice = client.completions.create(model="bytes", prompt=TEXT, logprobs=2, max_tokens=50).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*TEXT, "<end>"]
    chunks = client.completions.create(model="bytes", prompt=TEXT, logprobs=2, max_tokens=50, stream=True)
    parts: list[Any] = [chunk.choices[0].logprobs for chunk in chunks]
    assert [one for part in parts if part for one in part.token_logprobs] == choice.logprobs.token_logprobs


def test_message_parts(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="bytes", messages=messages)
    assert caught.value.param == "messages.0.content.0.type"


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-99", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="bytes", messages=MESSAGES, temperature=-1)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="bytes", prompt="x" * 200)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.completions.create(model="bytes", prompt="x", suffix="y", stream=True)
    assert unsupported.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as alone:
        client.chat.completions.create(model="bytes", messages=MESSAGES, top_logprobs=2)
    assert alone.value.param == "top_logprobs"


def test_a_stream_that_breaks_raises(served: Any, client: openai.OpenAI) -> None:
    faults, prompt = served.faults, TEXT * 5
    faults.step_s = 0.01
    chunks = iter(client.completions.create(model="bytes", prompt=prompt, max_tokens=90, stream=True))
    # Before it has begun, a stream that fails is an answer of the status 500.
    texts = [next(chunks).choices[0].text]
    faults.fail_code, faults.fail_retryable, faults.failing_attempts = "poisoned_request", False, 1
    with pytest.raises(openai.APIError) as caught:
        texts.extend(chunk.choices[0].text for chunk in chunks)
    assert prompt.startswith("".join(texts))
    assert caught.value.code == "poisoned_request"
    faults.step_s, faults.fail_retryable, faults.fail_code = 0.0, True, "worker_lost"


def test_a_failed_attempt_is_only_a_pause(served: Any, client: openai.OpenAI) -> None:
    served.faults.failing_attempts, served.faults.fail_after = 1, 3
    chunks = client.completions.create(model="bytes", prompt=TEXT, max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


def test_a_full_server_is_tried_again(served: Any, client: openai.OpenAI) -> None:
    served.faults.refuse_submits = "overloaded"
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="bytes", prompt="x")
    assert caught.value.status_code == 503
    served.faults.refuse_submits = ""


def test_leaving_a_stream_frees_it(served: Any, client: openai.OpenAI) -> None:
    served.faults.step_s = 0.01
    stream = client.completions.create(
        model="bytes", prompt=TEXT, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices[0].text
    assert served.scheduler.held
    stream.close()
    deadline = time.monotonic() + 1
    while served.scheduler.held and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not served.scheduler.held
    served.faults.step_s = 0.0


async def test_many_at_once(served: Any) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", timeout=60) as client:

        async def one(number: int) -> None:
            content = f"{number} {TEXT}"
            messages: Any = [{"role": "user", "content": content}]
            stream = await client.chat.completions.create(model="bytes", messages=messages, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == content

        await asyncio.gather(*(one(number) for number in range(40)))


def test_what_it_sends_is_all_known(served: Any) -> None:
    """The package's own fields are either served, neutral, or refused by name; none is taken for unknown."""
    from nodes.gateway.config import GatewayConfig
    from nodes.gateway.errors import BadRequest
    from nodes.gateway.jobs.validation import Validator

    chat, text = openai.resources.chat.completions.Completions, openai.resources.completions.Completions
    validator = Validator(GatewayConfig(model_name="bytes", context_length=10))
    surfaces = ((chat, {"messages": MESSAGES}, validator.chat), (text, {"prompt": "x"}, validator.text))
    for of_package, needed, read in surfaces:
        fields = set(of_package.create.__annotations__)
        fields -= {"return", "extra_headers", "extra_query", "extra_body", "timeout", *needed}
        for field in fields:
            try:
                unknown = read(json.dumps({**needed, field: None}).encode(), "id").unknown_fields
            except BadRequest as error:
                unknown = [] if error.param == field else [error.message]
            assert unknown == [], field


def test_raw_events_are_what_the_package_expects(served: Any) -> None:
    with httpx.stream(
        "POST", served.url + "/v1/completions", json={"prompt": "ab", "stream": True}, verify=False
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_an_api_key_is_needed_where_there_are_any(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write_key_file(file, (ApiKey("alice", sha256_of("sk-alice"), requests=1),))
    with (
        ServedRing(msgspec.structs.replace(CONFIG, api_key_file=str(file))) as ring,
        openai.OpenAI(base_url=ring.url + "/v1", api_key="sk-alice", max_retries=0, timeout=20) as client,
    ):
        stream = client.chat.completions.create(model="bytes", messages=MESSAGES, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT
        with pytest.raises(openai.AuthenticationError) as refused:
            client.with_options(api_key="sk-wrong").chat.completions.create(model="bytes", messages=MESSAGES)
        assert refused.value.code == "invalid_api_key"
        ring.faults.silent = True
        running = client.chat.completions.create(model="bytes", messages=MESSAGES, stream=True)
        with running, pytest.raises(openai.RateLimitError, match="'alice' has 1 requests at work"):
            client.chat.completions.create(model="bytes", messages=MESSAGES)
