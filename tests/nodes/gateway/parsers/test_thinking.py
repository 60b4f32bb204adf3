"""Reasoning: where it begins is said by the end of the rendered prompt, and what is left goes on to the calls."""

import pytest

from nodes.gateway.parsers import ParserNames, make_parser
from nodes.gateway.parsers.events import END, Mark, Reasoning, Text
from tests.nodes.gateway.parsers.whole import whole_answer

TOOLS = {"get": {}}
CALL = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'


def answer(reasoning, tail, text, calls="hermes"):
    whole = None
    for size in (1, 3, 1 << 20):
        parser = make_parser(ParserNames(calls, reasoning), tail, TOOLS)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        events += parser.close()
        assert "".join(event.source for event in events) == text
        assert whole is None or whole == whole_answer(events)
        whole = whole_answer(events)
    return whole


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "deepseek_v3"])
def test_reasoning_that_the_model_opens(name):
    assert answer(name, "<|im_start|>assistant\n", f"<think>\nHm </thin\n</think>\n\nYes {CALL}") == (
        "\n\nYes ", "\nHm </thin\n", [("get", "{}")],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "deepseek_v3"])
def test_reasoning_that_the_prompt_opened(name):
    assert answer(name, "<｜Assistant｜><think>\n", f"Hm</think>\n\n{CALL}") == ("", "Hm", [("get", "{}")])


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "deepseek_v3"])
def test_reasoning_that_the_prompt_opened_and_closed(name):
    assert answer(name, "<think>\n\n</think>\n\n", "Yes </think> <think>") == ("Yes </think> <think>", "", [])


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_reasoning_that_never_ends_is_reasoning(name):
    text = f"Hm {CALL} </think"
    assert answer(name, "<think>\n", text) == ("", text, [])


def test_an_answer_that_opens_nothing_is_text_or_with_r1_reasoning():
    assert answer("qwen3", "assistant\n", "\nYes <think>") == ("\nYes <think>", "", [])
    assert answer("deepseek_v3", "<｜tool▁output▁end｜>", "Yes") == ("Yes", "", [])
    assert answer("deepseek_r1", "<｜Assistant｜>", "\nHm</think>Yes") == ("Yes", "\nHm", [])


def test_what_a_user_wrote_opens_nothing():
    assert answer("qwen3", "what is <think><|im_end|>\n<|im_start|>assistant\n", "Yes") == ("Yes", "", [])


def test_other_marks():
    assert answer("mistral", "[/INST]", "[THINK]Hm[/THINK]Yes", "mistral") == ("Yes", "Hm", [])
    assert (
        answer("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>Hm<|end|>", None).reasoning == "Hm"
    )


def test_without_parsers_all_is_text():
    parser = make_parser(ParserNames(), "<think>\n", TOOLS)
    assert [*parser.feed("a</think>"), *parser.feed(""), *parser.close()] == [Text("a</think>"), END]


def test_without_tools_calls_are_text():
    parser = make_parser(ParserNames("hermes", "qwen3"), "<think>", {})
    assert [*parser.feed("a</think>" + CALL), *parser.close()] == [Reasoning("a"), Mark("</think>"), Text(CALL), END]
