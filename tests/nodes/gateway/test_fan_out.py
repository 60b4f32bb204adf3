"""One request for each sample of each prompt."""

import json
from typing import Any

import msgspec
import pytest

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest
from nodes.gateway.jobs.fan_out import fan_out
from nodes.gateway.jobs.validation import Job, Validator
from nodes.protocol import Route

CONFIG = GatewayConfig(model_name="m", context_length=100)


def job(kind: str = "text", **fields: Any) -> Job:
    validator = Validator(CONFIG)
    if kind == "text":
        return validator.text(json.dumps({"prompt": "x"} | fields).encode(), "cmpl-1")
    messages = [{"role": "user", "content": "x"}]
    return validator.chat(json.dumps({"messages": messages} | fields).encode(), "chatcmpl-1")


def opened(job: Job, *lengths: int) -> list[Any]:
    prompts = [[7] * length for length in lengths]
    routes = [Route(decode=f"d{i}") for i in range(len(lengths))]
    return fan_out(job, prompts, routes, seed=99, arrived_at=1.5, config=CONFIG)


def test_samples_of_prompts_in_the_order_of_choices() -> None:
    requests = opened(job(n=2, seed=5), 3, 4)
    assert [request.request_id for request in requests] == ["cmpl-1-0", "cmpl-1-1", "cmpl-1-2", "cmpl-1-3"]
    assert [len(request.prompt_ids) for request in requests] == [3, 3, 4, 4]
    assert [request.spec.sampling.sample_index for request in requests] == [0, 1, 0, 1]
    assert {request.spec.sampling.seed for request in requests} == {5}
    assert [request.route.decode for request in requests] == ["d0", "d0", "d1", "d1"]
    assert {request.arrived_at for request in requests} == {1.5}


def test_a_seed_is_drawn_where_none_was_given() -> None:
    assert opened(job(), 3)[0].spec.sampling.seed == 99
    assert opened(job(seed=0), 3)[0].spec.sampling.seed == 0


@pytest.mark.parametrize(
    ("kind", "fields", "length", "max_tokens"),
    [
        ("text", {}, 10, 16),
        ("text", {}, 95, 5),
        ("text", {"min_tokens": 20}, 10, 20),
        ("text", {"max_tokens": 90}, 10, 90),
        ("chat", {}, 10, 90),
        ("chat", {"max_completion_tokens": 3}, 10, 3),
    ],
)
def test_how_many_tokens(kind: str, fields: dict[str, int], length: int, max_tokens: int) -> None:
    assert opened(job(kind, **fields), length)[0].spec.stop.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("kind", "fields", "length", "param", "words"),
    [
        ("text", {}, 0, "prompt", "no tokens"),
        ("text", {}, 100, "prompt", "your prompt resulted in 100 tokens"),
        ("text", {}, 5000, "prompt", "your prompt resulted in 5000 tokens"),
        ("chat", {}, 100, "messages", "your messages resulted in 100 tokens"),
        ("text", {"max_tokens": 91}, 10, "max_tokens", "101 tokens (10 in the prompt, 91 in the completion)"),
        ("chat", {"max_completion_tokens": 91}, 10, "max_completion_tokens", "101 tokens (10 in the messages, 91 in"),
        ("text", {"min_tokens": 91}, 10, "min_tokens", "101 tokens (10 in the prompt, 91 in the completion)"),
    ],
)
def test_no_room(kind: str, fields: dict[str, int], length: int, param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        opened(job(kind, **fields), length)
    assert caught.value.param == param
    assert caught.value.code == ("context_length_exceeded" if length else "invalid_value")
    assert words in caught.value.message
    assert caught.value.message.startswith("This model's maximum context length is 100 tokens. ") == bool(length)


def test_texts_of_asks_travel_as_the_ids_that_a_tokenizer_gave() -> None:
    asked_for = job(bad_words=["no"], presence_penalty=1.0)
    requests = fan_out(
        asked_for, [[1, 2]], [Route(decode="d")], seed=1, arrived_at=0.0, config=CONFIG, words=[[7, 8], [9]]
    )
    words, penalties = requests[0].spec.sampling.asks
    assert (words.name, penalties.name) == ("bad_words/1", "penalties/1")
    assert msgspec.msgpack.decode(words.value) == [[], [[7, 8], [9]]]
    assert requests[0].spec.sampling.looks_back
