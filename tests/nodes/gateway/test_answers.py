"""Chats whose answers are taken apart: the same for streamed and whole ones, however an answer is cut."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from mesh.actor import Answer
from mesh.address import Address
from nodes.gateway.asked.answer_form import AnswerForm, form_of
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import Internal
from nodes.gateway.jobs.answer_events import AnswerFields, Answers, merged
from nodes.gateway.parsers import ParserNames
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from nodes.gateway.parsers.plugins import ParserUnusable
from nodes.protocol import TemplateIs
from tests.nodes.gateway.parsers.whole import Answer as Joined
from tests.nodes.gateway.parsers.whole import Call, joined

QWEN = ParserNames("hermes", "qwen3")
CALLS = '<tool_call>\n{"name": "%s", "arguments": {"n": 1}}\n</tool_call>'
ANSWER = "<think>\nhm\n</think>\n\nWell. " + CALLS % "one" + "\n" + CALLS % "two"


def shown(text: str, size: int = 1000, names: ParserNames = QWEN, **fields: Any) -> list[Event]:
    given = AnswerFields(is_chat=True, **{"tools": {"one": {}, "two": {}}, **fields})
    sample = Answers(AnswerForm(names), given, "", ["r-0"]).samples[0]
    events = [event for at in range(0, len(text), size) for event in sample.feed(text[at : at + size])]
    return list(merged([*events, *sample.close()]))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls(size: int) -> None:
    events = shown(ANSWER, size)
    assert [type(event) for event in events[:3]] == [Reasoning, Text, CallBegin]
    whole = joined(events)
    assert (whole.text, whole.reasoning.strip()) == ("\n\nWell. ", "hm")
    assert whole.calls == [Call("one", '{"n": 1}'), Call("two", '{"n": 1}')]


def test_only_one_call() -> None:
    assert joined(shown(ANSWER, one_call=True)).calls == [Call("one", '{"n": 1}')]


def test_reasoning_as_text_hidden_or_in_one_piece() -> None:
    assert joined(shown(ANSWER, reasoning="text")).text == "<think>\nhm\n</think>\n\nWell. "
    assert joined(shown(ANSWER, reasoning="hidden")) == joined(shown(ANSWER))._replace(reasoning="")
    events = shown(ANSWER, 1, streams_reasoning=False)
    assert [event for event in events if isinstance(event, Reasoning)] == [Reasoning("\nhm\n")]
    assert joined(shown("<think>without end", 1, streams_reasoning=False)) == Joined("", "without end", [])


def test_a_call_that_is_cut_is_text() -> None:
    cut = "Well. " + (CALLS % "one")[:-20]
    events = shown(cut, 2)
    assert [type(event) for event in events] == [Text, CallBegin, CallArguments, CallEnd, Text]
    assert joined(events) == Joined(cut, "", [])


def test_ids_of_calls_do_not_depend_on_anything_else() -> None:
    form = AnswerForm(ParserNames("mistral"), short_ids=True)
    answers = [Answers(form, AnswerFields(is_chat=True), "", ["r-0", "r-1"]) for _ in range(2)]
    assert answers[0].call_id(1, 0) == answers[1].call_id(1, 0)
    assert len({answers[0].call_id(number, index) for number in range(2) for index in range(2)}) == 4
    assert len(answers[0].call_id(0, 0)) == 9


def messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def chat(ring: Any, client: Any, text: str, **fields: Any) -> Any:
    ring.tokenizer.template = TemplateIs(
        template="</think> json object with function name and arguments within <tool_call>", shows_tools=True
    )
    body = {"messages": messages(text), "max_tokens": 199 - len(text.encode()), **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


async def test_reasoning_streamed_is_reasoning_whole(ring: Any, client: Any) -> None:
    text = "<think>a little</think>Answer"
    whole = (await chat(ring, client, text)).json()["choices"][0]
    assert whole["message"]["reasoning"] == whole["message"]["reasoning_content"] == "a little"
    assert whole["message"]["content"] == "Answer"
    streamed = await chat(ring, client, text, stream=True)
    lines = [line[6:] for line in streamed.text.split("\n") if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole["message"][name]


def test_a_tokenizer_s_answer_that_is_none_and_a_parser_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sender = GatewayConfig(model_name="m", context_length=9), Address("tok", 1)
    with pytest.raises(Internal, match="does not match the request"):
        form_of(Answer("what", (), sender), config)

    def unusable(names: ParserNames) -> list[str]:
        raise ParserUnusable(f"{names.calls} is gone")

    monkeypatch.setattr("nodes.gateway.asked.answer_form.marks_of", unusable)
    with pytest.raises(Internal, match="hermes is gone"):
        form_of(Answer(TemplateIs(template="<tool_call>"), (), sender), replace(config, tool_call_parser="hermes"))
