"""Structured output over HTTP, from the client's fields to the worker's draws, and what goes wrong with it."""

import concurrent.futures
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.serving.conftest import APART, RunningMesh

pytestmark = [pytest.mark.process, pytest.mark.clients]

CHAT: Any = [{"role": "user", "content": "Who has pears?"}]
NAMED = "response_format.json_schema.schema"


class Pear(pydantic.BaseModel):
    color: Literal["green", "yellow"]
    weight_g: int = pydantic.Field(ge=50, le=400, description="as bought")


class Basket(pydantic.BaseModel):
    owner: str = pydantic.Field(max_length=12)
    pears: list[Pear] = pydantic.Field(max_length=4)
    rest: Pear | None


NUMBERS = {
    "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "minItems": 60, "maxItems": 60,
}  # fmt: skip


@pytest.fixture
def mesh(mesh_of: Any) -> RunningMesh:
    return mesh_of(*APART)


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def said(mesh: RunningMesh, **body: Any) -> str:
    status, answer = mesh.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 400, "seed": 1, **body})
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return answer["choices"][0]["message"]["content"]


def refused(mesh: RunningMesh, **body: Any) -> tuple[int, str, str | None]:
    status, answer = mesh.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 64, **body})
    assert status != 200, answer
    return status, answer["error"]["code"], answer["error"]["param"]


def strict(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_openais_parse_with_a_model_of_pydantic(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=CHAT, response_format=Basket, temperature=temperature, seed=3, max_tokens=400
    )
    basket = answer.choices[0].message.parsed
    assert isinstance(basket, Basket)
    assert basket == Basket.model_validate_json(answer.choices[0].message.content or "")


def test_streamed_it_is_the_same(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": CHAT, "response_format": Basket, "seed": 3, "max_tokens": 400}
    whole = client.chat.completions.parse(**asked).choices[0].message.content
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole


def test_each_way_to_ask(mesh: RunningMesh) -> None:
    jsonschema.validate(json.loads(said(mesh, structured_outputs={"json": NUMBERS})), NUMBERS)
    assert said(mesh, guided_choice=["yes", "no"], temperature=1) in ("yes", "no")
    assert re.fullmatch("[a-f]{4,9}!", said(mesh, regex="^[a-f]{4,9}!$", temperature=1))
    assert said(mesh, ebnf='root ::= "a" ("b" | "c")') in ("ab", "ac")
    # Nothing but the end is left: neither can be heeded.
    assert said(mesh, guided_choice=["yes"], min_tokens=20, ignore_eos=True) == "yes"
    assert said(mesh, guided_choice=["yes", "no"], logit_bias={"0": 100, "2": 100}) in ("yes", "no")
    status, answer = mesh.post("/v1/completions", {"prompt": "a", "regex": "b{3}", "n": 3, "temperature": 1})
    assert (status, [one["text"] for one in answer["choices"]]) == (200, ["bbb"] * 3)


def test_any_json_object(mesh: RunningMesh) -> None:
    status, answer = mesh.post(
        "/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}, "max_tokens": 100}
    )
    choice = answer["choices"][0]
    assert status == 200, answer
    assert choice["message"]["content"].lstrip().startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


def test_what_is_refused_and_that_others_go_on(mesh: RunningMesh) -> None:
    pids = [one["pid"] for one in mesh.ps()]
    assert refused(mesh, response_format=strict({"type": "array", "uniqueItems": True})) == (
        400, "unsupported_schema", NAMED,
    )  # fmt: skip
    assert refused(mesh, guided_json={"$ref": "#"}) == (400, "invalid_value", "guided_json")
    assert refused(mesh, guided_json={"$ref": "http://127.0.0.1/x"}) == (400, "invalid_value", "guided_json")
    assert refused(mesh, guided_json={"a": "x" * 1_000_000}) == (400, "invalid_value", "guided_json")
    assert refused(mesh, guided_json=json.loads('{"items":' * 900 + "{}" + "}" * 900))[0] == 400
    assert refused(mesh, regex=r"[^\s\S]") == (400, "invalid_value", "regex")
    assert refused(mesh, regex="a", guided_choice=["b"]) == (400, "invalid_value", "guided_choice")
    assert refused(mesh, guided_grammar="start: <|nobody|>") == (400, "grammar_failed", None)
    # It compiles for minutes: the tokenizer's child is killed, and nobody else notices.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        endless = pool.submit(refused, mesh, guided_json={"type": "integer", "multipleOf": 9_999_991})
        assert said(mesh, response_format={"type": "text"}, temperature=0)
        assert endless.result() == (400, "invalid_value", "guided_json")
    assert said(mesh, guided_choice=["yes"]) == "yes"
    assert [one["pid"] for one in mesh.ps()] == pids


def test_with_a_worker_killed_midway_it_is_the_same_text(mesh: RunningMesh, client: openai.OpenAI) -> None:
    def streamed(seed: int, victims: list[int]) -> str:
        text = ""
        for chunk in client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, seed=seed, temperature=1, max_tokens=600,
            response_format=strict(NUMBERS),
        ):  # fmt: skip
            text += chunk.choices[0].delta.content or ""
            if len(text) > 40 and victims:
                os.kill(victims.pop(), signal.SIGKILL)
        return text

    def all_of_them(victims: list[int]) -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda seed: streamed(seed, victims), range(4)))

    expected = all_of_them([])
    for text in expected:
        jsonschema.validate(json.loads(text), NUMBERS)
    pids = [one["pid"] for one in mesh.ps() if one["role"] == "worker"]
    assert len(pids) == 2
    assert all_of_them(pids) == expected
