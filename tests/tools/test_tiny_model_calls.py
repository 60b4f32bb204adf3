"""Conversations with tools: the grammar, the chat template and the server's parsers write and read the same text."""

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from nodes.gateway.parsers import make_parser
from nodes.gateway.parsers.templates import parser_of_template
from nodes.tokenizer.errors import TemplateError
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate
from tests.nodes.gateway.parsers.whole import whole_answer
from tools.tiny_model.agent_loop import LoopScore, before_calls, calls_of, held_out_loops, run_loops
from tools.tiny_model.calling import TOOL_FAMILIES
from tools.tiny_model.conversation import Example
from tools.tiny_model.evaluate import Model
from tools.tiny_model.grammar import FAMILY_NAMES, sample, training_examples
from tools.tiny_model.requests import NO_TOOL, SERVICES
from tools.tiny_model.tokenizer import CHAT_TEMPLATE, render

DIRECTORY = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny"
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, 100_000)
TOOLS = {service.tool.name: service.tool for service in SERVICES}


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    return TEMPLATE.render(ChatRequest(json.dumps(messages).encode(), json.dumps(tools).encode() if tools else None))


def examples(family: str, count: int) -> list[Example]:
    rng = Random(4)
    return [sample(rng, family) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_template_renders_what_clients_send_as_training_did(family: str) -> None:
    for example in examples(family, 10):
        expected = render(example.messages, tools=example.tools)
        messages = [message.openai() for message in example.messages]
        tools = [tool.openai() for tool in example.tools]
        assert rendered(messages, tools) == expected
        # Arguments as clients send them, text in a string, and tools without the wrapper.
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        assert rendered(messages, [tool["function"] for tool in tools]) == expected


def test_a_signature_shows_any_schema() -> None:
    parameters = {"properties": {"items": {"type": ["string", "null"]}, "a": {}, "b": {"type": "object"}}}
    tools = [
        {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "all", "parameters": {"type": "object"}}},
    ]
    assert rendered([{"role": "user", "content": "Hi"}], tools) == (
        "<|im_start|>system\nTools:\nfind(items: string|null, a: any, b: object)\nnow()\nall()<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_words_stand_before_the_calls_they_come_with() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]}]
    text = '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nWait.\n{text}\n{text}<|im_end|>\n" in rendered(messages, [])


def test_other_roles_are_refused() -> None:
    with pytest.raises(TemplateError, match="tiny knows the roles system, user, assistant and tool, not critic"):
        rendered([{"role": "user", "content": "Hi"}, {"role": "critic", "content": "No."}], [])


@pytest.mark.parametrize("family", ["call", "call_two"])
def test_the_parser_that_the_template_names_reads_the_answers(family: str) -> None:
    names = parser_of_template(CHAT_TEMPLATE)
    for example in examples(family, 30):
        parser = make_parser(names, "", {tool.name: tool.openai()["function"]["parameters"] for tool in example.tools})
        answer = whole_answer([*parser.feed(example.answer), *parser.close()])
        said = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in answer.calls]
        assert (answer.text, said) == ("", calls_of(example.answer))
        assert len(said) == (2 if family == "call_two" else 1)


def test_calls_are_of_tools_on_offer_and_have_their_parameters() -> None:
    subsets: set[tuple[str, ...]] = set()
    for example in (e for e in islice(training_examples(0), 2000) if e.family in TOOL_FAMILIES):
        offered = [tool.name for tool in example.tools]
        subsets.add(tuple(offered))
        for call in (call for message in example.messages for call in message.calls):
            assert call.name in offered
            assert [*json.loads(call.arguments)] == [name for name, _ in TOOLS[call.name].parameters]
        if example.answer == NO_TOOL:
            asked = [s.tool.name for s in SERVICES if s.tool.name not in offered]
            assert asked
    assert {len(subset) for subset in subsets} == {0, 1, 2, 3, 4, 5, 6}
    assert len(subsets) > 200


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Hello!", []),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [{"name": "f", "arguments": {}}]),
        ('Well: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', None),
        ('<tool_call>\n{"name": "f", "arguments": {\n</tool_call>', None),
        ('<tool_call>\n{"name": "f", "arguments": {}}', None),
    ],
)
def test_an_answer_s_calls_are_read_strictly(text: str, calls: list[Any] | None) -> None:
    assert calls_of(text) == calls


def test_a_loop_counts_calls_and_the_answers_after_them() -> None:
    loops = held_out_loops(5, 40)
    right = {one: one.answer for loop in loops for one in (before_calls(loop), loop)}
    assert run_loops(lambda asked: [right[one] for one in asked], loops) == LoopScore(40, 40, 40)
    wrong_calls = {before_calls(loop) for loop in loops if loop.family == "call_result"}
    said = [lambda one: "" if one in wrong_calls else right[one], lambda one: "" if one in loops else right[one]]
    assert run_loops(lambda asked: [said[0](one) for one in asked], loops) == LoopScore(40, 20, 20)
    assert run_loops(lambda asked: [said[1](one) for one in asked], loops) == LoopScore(40, 40, 0)


def test_the_marks_are_tokens_that_decoding_shows() -> None:
    tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    ids = tokenizer.encode('<tool_call>\n{"a": 1}\n</tool_call>').ids
    assert (ids[0], ids[-1]) == (1022, 1023)
    assert tokenizer.decode(ids, skip_special_tokens=True) == '<tool_call>\n{"a": 1}\n</tool_call>'


# What the model card says, with room for other builds of torch on the few questions of the short one.
@pytest.mark.parametrize(("questions", "least"), [(20, 18), pytest.param(500, 475, marks=pytest.mark.slow)])
def test_an_agent_s_loop_gets_the_right_calls(questions: int, least: int) -> None:
    model = Model(DIRECTORY)
    score = run_loops(lambda asked: [one.text for one in model.answer(asked)], held_out_loops(1, questions))
    assert score.questions == questions
    assert score.right_calls >= least
    assert score.right_answers >= 0.9 * questions
