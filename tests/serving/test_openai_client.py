"""The `openai` client against a real mesh with the bundled model, prefill and decode apart and together."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.conftest import APART, MIXED

SAMPLES = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny" / "samples.json"

pytestmark = [pytest.mark.process, pytest.mark.clients]


# A mesh of the other kind gives the same text (`test_same_text.py`), and is asked in `make test-all`.
@pytest.fixture(params=[APART, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["disaggregated", "mixed"])
def client(request: pytest.FixtureRequest, mesh_of: Any) -> Iterator[openai.OpenAI]:
    url = mesh_of(*request.param).url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_answers_are_the_model_s(client: openai.OpenAI) -> None:
    """Each sample's answer is what the model gives by itself, outside this server."""
    samples = json.loads(SAMPLES.read_text())
    wrong: list[str] = []
    for sample in samples:
        answer = client.chat.completions.create(
            model="tiny", messages=sample["messages"], temperature=0, max_tokens=1024
        )
        if answer.choices[0].message.content != sample["answer"]:
            wrong.append(f"{sample['messages']!r}: {answer.choices[0].message.content!r} not {sample['answer']!r}")
        assert answer.choices[0].finish_reason == "stop"
    assert not wrong, "\n".join(wrong)


def longest_sample() -> Any:
    return max(json.loads(SAMPLES.read_text()), key=lambda sample: sample["completion_tokens"])


def test_stream_is_the_same_text_and_counts_usage(client: openai.OpenAI) -> None:
    sample = longest_sample()
    stream = client.chat.completions.create(
        model="tiny",
        messages=sample["messages"],
        temperature=0,
        max_tokens=1024,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == sample["answer"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sample["completion_tokens"]
    assert chunks[-1].usage.prompt_tokens == sample["prompt_tokens"]


def test_stream_comes_as_it_is_made(client: openai.OpenAI) -> None:
    # 400 tokens take half a second: longer than any wait for a core, after which what has come is sent at once.
    stream = client.completions.create(
        model="tiny", prompt="Once", temperature=0, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    assert len([chunk for chunk in stream if chunk.choices]) > 10, "not one lump at the end"


def test_seeded_sampling_repeats_and_n_differs(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="Once", seed=seed, n=4, temperature=1.5, max_tokens=24, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = draw(7)
    assert draw(7) == first
    assert len(set(first)) == 4
    assert draw(8) != first


def test_the_edges_of_greedy_give_one_text_and_min_tokens_a_longer_one(client: openai.OpenAI) -> None:
    messages = min(json.loads(SAMPLES.read_text()), key=lambda sample: sample["completion_tokens"])["messages"]

    def answer(**fields: Any) -> Any:
        return client.chat.completions.create(model="tiny", messages=messages, max_tokens=64, extra_body=fields)

    greedy = answer(temperature=0)
    said = greedy.choices[0].message.content
    for fields in ({"temperature": 1e-60}, {"temperature": 1e-45}, {"top_p": 0}, {"top_k": 1}, {"top_p": 1e-12}):
        assert answer(**fields).choices[0].message.content == said, fields
    least = greedy.usage.completion_tokens + 5
    longer = answer(temperature=0, min_tokens=least)
    assert longer.usage.completion_tokens >= least
    assert longer.choices[0].message.content.startswith(said)


def test_stop_string_ends_before_it(client: openai.OpenAI) -> None:
    sample = longest_sample()
    middle = len(sample["answer"]) // 2
    stop = sample["answer"][middle : middle + 4]
    answer = client.chat.completions.create(
        model="tiny", messages=sample["messages"], temperature=0, stop=[stop], max_tokens=1024
    )
    assert answer.choices[0].message.content == sample["answer"][: sample["answer"].index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_second_time_is_cached(client: openai.OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy dog again and again. " * 8
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_errors_name_the_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 20_000)
    assert caught.value.code == "context_length_exceeded"
