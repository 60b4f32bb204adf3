"""Calls as models write them beside their templates, by public reports: read where they can mean one thing only."""

import json
from typing import Any

import pytest

from tests.nodes.gateway.parsers.whole import whole_answer
from tests.nodes.gateway.parsers.written import merged, parse

TOOLS = {
    "get": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"type": "object"},
            "m": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]},
            "t": {"type": ["string", "null"], "enum": ["none", "all", None]},
            "x": {"type": ["string", "object", "array"]},
        },
        "$defs": {"a/b": {"type": "integer"}},
    },
    "put": {},
}
N: Any = [{"n": 1}]
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>"
END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

ODD: list[tuple[str, str, list[Any]]] = [
    # Arguments as the API says them: JSON of an object, as a text.
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"n\\": 1}"}</tool_call>', N),
    ("hermes", '<tool_call>{"arguments": "{\\"n\\": 1}", "name": "get"}</tool_call>', N),
    ("hermes", '<tool_call>{"name": "get", "arguments": ""}</tool_call>', [{}]),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"s\\": \\"\\ud800\\"}"}</tool_call>', [{"s": "\ud800"}]),
    ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": "{\\"n\\": 1}"}]', N),
    ("llama3_json", '{"name": "get", "parameters": "{\\"n\\": 1}"}; {"name": "put", "parameters": {}}', [{"n": 1}, {}]),
    # And the call as the API says it.
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "get", "arguments": {"n": 1}}}</tool_call>', N),
    ("llama3_json", '{"type": "function", "function": {"name": "get", "parameters": {"n": 1}}}', N),
    ("llama3_json", '{"type": "function", "name": "get", "parameters": {"n": 1}}', N),
    ("llama3_json", '<|python_tag|>{"function": "get", "parameters": {"n": 1}, "id": "c1"}', N),
    ("mistral", '[TOOL_CALLS][{"id": "x", "function": {"name": "get", "arguments": "{\\"n\\": 1}"}}]', N),
    # A brace too few or too many.
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"n": 1}\n</tool_call>', N),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"n": 1}}}\n</tool_call>', N),
    # Line ends and tabs in strings as they are.
    ("hermes", '<tool_call>{"name": "get", "arguments": {"s": "a\n\tb\r\n"}}</tool_call>', [{"s": "a\n\tb\r\n"}]),
    ("hermes", '<tool_call>{"arguments": {"s": "a\n\tb"}, "name": "get"}</tool_call>', [{"s": "a\n\tb"}]),
    ("deepseek_v31", V31 + '{"s": "a\nb"}' + END, [{"s": "a\nb"}]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"s": "</tool_call>"}}</tool_call>', [{"s": "</tool_call>"}]),
    # Several objects between two marks, one object where there is a list.
    ("hermes", '<tool_call>\n{"name": "get"}\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>', [{}, {"n": 1}]),
    ("mistral", '[TOOL_CALLS]{"name": "get", "arguments": {"n": 1}}', N),
    ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "put"}, {"arguments": {"n": 1}, "name": "get"}]',
     [{}, {"n": 1}]),
    # Each version of DeepSeek as the other one, and fences.
    ("deepseek_v31", V3 + '{"n": 1}\n```' + END, N),
    ("deepseek_v3", V31 + '{"n": 1}' + END, N),
    ("deepseek_v31", V31 + '```json\n{"n": 1}\n```' + END, N),
    # gpt-oss: another channel, no namespace, a type that is glued to the name.
    ("openai", '<|channel|>analysis to=functions.get code<|message|>\n{"n": 1}<|call|>', N),
    ("openai", '<|channel|>commentary to=get <|constrain|>json<|message|>{"n": 1}<|call|>', N),
    ("openai", '<|channel|>commentary to=functions.getjson<|message|>{"n": 1}<|call|>', N),
    # Qwen3-Coder: quotes, other line ends, marks that are missing.
    ("qwen3_coder", '<function="get"><parameter="n">1</parameter><parameter=\'s\'>x</parameter></function>',
     [{"n": 1, "s": "x"}]),
    ("qwen3_coder", "<tool_call>\r\n<function=get>\r\n<parameter=n>\r\n1\r\n</parameter>\r\n<parameter=s>\r\nx\r\ny\r\n"
     "</parameter>\r\n</function>\r\n</tool_call>", [{"n": 1, "s": "x\r\ny"}]),
    ("qwen3_coder", "<function=get>\n<parameter=s>\nx\r\n</parameter>\n</function>", [{"s": "x\r"}]),
    # Blanks around a text are its own, and so is a line end if the value began within the line.
    ("qwen3_coder", "<function=get>\n<parameter=s>\n    if x:\n        y\n\n</parameter>\n</function>",
     [{"s": "    if x:\n        y\n"}]),
    ("qwen3_coder", "<function=get><parameter=s>x\n</parameter></function>", [{"s": "x\n"}]),
    ("qwen3_coder", "<function=get><parameter=s>x\r\n</parameter></function>", [{"s": "x\r\n"}]),
    ("qwen3_coder", "<function=get>\r\n<parameter=s>\r\nx\n</parameter></function>", [{"s": "x"}]),
    ("qwen3_coder", "<function=get><parameter=s>x\n<parameter=n>1</parameter></function>", [{"s": "x", "n": 1}]),
    ("qwen3_coder", "<function=get>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", N),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=s>\nx\n<parameter=n>\n1\n</parameter>\n</function>",
     [{"s": "x", "n": 1}]),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=n>\n1\n<parameter=s>\nx\n</function>\n</tool_call>\n",
     [{"n": 1, "s": "x"}]),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=s>\nx\n</function>", [{"s": "x"}]),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=n>\n1\n</parameter>\n</tool_call>", N),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=n>\n1\n</function>\n</tool_call>", N),
    # A line of a text that begins no other parameter of the tool is the text's.
    ("qwen3_coder",
     "<function=get>\n<parameter=s>\nx\n<parameter=q>\n<parameter=s>\n</function>\n.\n</parameter>\n</function>",
     [{"s": "x\n<parameter=q>\n<parameter=s>\n</function>\n."}]),
    # Values that are nearly what the schema asks for, and what is none.
    *(("qwen3_coder", f"<function=get><parameter=n>{raw}</parameter></function>", [{"n": value}]) for raw, value in (
        ("140.0", 140), ("2e0", 2), ("-3.0", -3), ("+07", 7), ('"2"', 2), (" 7\n", 7), ("null", None), ("1.5", 1.5),
        ("2026-01-15", "2026-01-15"), ("-", "-"), ("NaN", "NaN"), ("1e400", "1e400"))),
    *(("qwen3_coder", f"<function=get><parameter=o>{raw}</parameter></function>", [{"o": value}]) for raw, value in (
        ('{"a": [NaN]}', '{"a": [NaN]}'), ("{'a': Infinity}", "{'a': Infinity}"), ("[-Infinity]", "[-Infinity]"),
        ("{'a': None, 'b': True}", {"a": None, "b": True}), ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": "</parameter></function>"}', {"a": "</parameter></function>"}), ('["abc', '["abc'),
        ("{'a': '\\ud800'}", {"a": "\ud800"}))),
    *(("qwen3_coder", f"<function=get><parameter=m>{raw}</parameter></function>", [{"m": value}]) for raw, value in (
        ("2", 2), ("None", None), ("2.0", 2))),
    *(("qwen3_coder", f"<function=get><parameter=t>{raw}</parameter></function>", [{"t": value}]) for raw, value in (
        ("none", "none"), ("null", None), (" all ", "all"), ("some", "some"))),
    # A text that begins as JSON and is never closed; the quote of the next one, or of the next call, closes nothing. In
    # JSON no line ends within a string, so that a mark in one is the value's.
    *(("qwen3_coder", 2 * (f"<tool_call>\n<function=get>\n<parameter=x>\n{raw}\n</parameter>\n<parameter=s>\n"
       "{\"\n</parameter>\n</function>\n</tool_call>\n"), 2 * [{"x": value, "s": '{"'}]) for raw, value in (
        ('{"', '{"'), ('{"a": "b', '{"a": "b'), ('["', '["'), ('"', '"'), ('{"a": "x\ny"}', '{"a": "x\ny"}'),
        ('{"a": "</parameter></function>"}', {"a": "</parameter></function>"}))),
]  # fmt: skip

NO_CALLS = [
    ("hermes", '<tool_call>{"name": "get", "arguments": {"n": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"n\\": NaN}"}</tool_call>'),
    ("hermes", '<tool_call>{"function": {"name": "got", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"function": {"function": {"name": "get"}}}</tool_call>'),
    ("llama3_json", '{"function": {"name": "get"}}'),
    ("mistral", '[TOOL_CALLS]{"name": "got", "arguments": {}}'),
    ("openai", "<|channel|>commentary to=got <|constrain|>json<|message|>{}<|call|>"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>got\n```json\n{}\n```" + END),
    ("qwen3_coder", "<function=get>\n<parameter=s>\nx\n</function>\nand more"),
    ("qwen3_coder", "<function=get>\n<parameter=s>\nx\n</parameter>"),
]


@pytest.mark.parametrize(("form", "text", "arguments"), ODD)
def test_what_models_write_is_read(form: str, text: str, arguments: list[Any]) -> None:
    whole = parse(form, text, TOOLS, [])
    answer = whole_answer(whole)
    assert [json.loads(call.arguments) for call in answer.calls] == arguments
    assert not answer.text.strip()
    for call in answer.calls:
        call.arguments.encode()
    assert "".join(event.source for event in whole) == text
    for cuts in (None, *([cut] for cut in range(1, len(text)))):
        assert merged(parse(form, text, TOOLS, cuts)) == merged(whole)


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_text_as_written(form: str, text: str) -> None:
    for cuts in ([], None):
        answer = whole_answer(parse(form, text, TOOLS, cuts))
        assert (answer.text, answer.calls) == (text, [])
