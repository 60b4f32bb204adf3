"""Each form of calls: what templates render, what comes out and when, and what is no call."""

import json

import pytest

from nodes.gateway.parsers import CALLS, ParserNames, make_parser
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, Mark, Reasoning, Text
from tests.nodes.gateway.parsers.whole import whole_answer
from tests.nodes.gateway.parsers.written import FORMS, TAILS, names_of, parse

TOOLS = {
    "get": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    "get_weather": {"properties": {"city": {"type": "string"}}},
}
ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "get", "parameters": {"n": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "get", "arguments": {"n": 1}}]',
    "mistral_named": '[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{"n": 1}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
    '{"n": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>"
    '{"n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "openai": '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"n": 1}<|call|>',
}


def answer(form, text, tools=TOOLS):
    return whole_answer(parse(form, text, tools))


@pytest.mark.parametrize("form", FORMS)
def test_a_call_of_an_offered_tool_comes_out(form):
    assert answer(form, ONE_CALL[form]) == ("", "", [("get", '{"n": 1}')])


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_that_was_not_offered_is_text_as_written(form):
    text = ONE_CALL[form].replace("get", "got")
    assert answer(form, text) == (text, "", [])


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_whose_name_begins_like_anothers_is_told_apart(form):
    tools = {**TOOLS, **{f"get_{i}": {} for i in range(126)}}
    assert answer(form, ONE_CALL[form].replace("get", "get_12"), tools).calls == [
        ("get_12", '{"n": "1"}' if form == "qwen3_coder" else '{"n": 1}')
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_cut_is_text_as_written(form):
    text = ONE_CALL[form]
    ends = 1 + text.rindex("</function>") if form == "qwen3_coder" else text.index("1}") + 1
    for length in range(ends):
        cut = text[:length]
        whole = answer(form, cut)
        assert not whole.calls
        assert whole.text == cut or (form == "openai" and cut.startswith(whole.text))
        assert "".join(event.source for event in parse(form, cut, TOOLS)) == cut


@pytest.mark.parametrize("form", [form for form in FORMS if form != "llama3_json"])
def test_no_more_of_plain_text_is_held_than_the_longest_mark(form):
    names = names_of(form)
    marks = CALLS[names.calls].triggers
    parser = make_parser(names, "<|start|>assistant<|channel|>final<|message|>" if form == "openai" else "", TOOLS)
    text = "".join(f"a {mark[:-1]} b {mark[:3]}" for mark in marks) * 2
    held = 0
    for char in text:
        held += 1 - sum(len(event.source) for event in parser.feed(char))
        assert held < max(map(len, marks))


@pytest.mark.parametrize("form", FORMS)
def test_arguments_go_out_as_they_come(form):
    text = ONE_CALL[form]
    at = text.index("1\n" if form == "qwen3_coder" else '{"n": 1}')
    parser = make_parser(names_of(form), TAILS.get(form, ""), TOOLS)
    if form == "qwen3_coder":
        assert [type(event) for event in parser.feed(text[:at])] == [CallBegin, CallArguments]
        return
    assert parser.feed(text[:at]) == []
    begin, *arguments = parser.feed('{"n')
    assert begin == CallBegin(0, "get", text[:at])
    assert arguments == [CallArguments(0, '{"n', '{"n')]
    assert parser.feed('": 1') == [CallArguments(0, '": 1', '": 1')]


def test_text_of_a_parameter_goes_out_as_it_comes():
    parser = make_parser(ParserNames("qwen3_coder"), "", TOOLS)
    parser.feed("<tool_call>\n<function=get>\n<parameter=s>\n")
    assert parser.feed('say "hi"\n') == [CallArguments(0, '"say \\"hi\\"', 'say "hi"')]
    assert parser.feed("</para") == []
    assert parser.feed("graph>") == [CallArguments(0, "\\n</paragraph>", "\n</paragraph>")]


def test_arguments_that_come_before_the_name_wait_for_it():
    text = '<tool_call>{"arguments": {"n": 1}, "name": "get"}</tool_call>'
    begin, arguments, end, _, _ = parse("hermes", text, TOOLS, [])
    assert begin == CallBegin(0, "get", '<tool_call>{"arguments": {"n": 1}, "name": "get"')
    assert arguments == CallArguments(0, '{"n": 1}', "")
    assert end == CallEnd(0, True, "}")


def test_a_call_without_arguments_has_none():
    assert answer("hermes", '<tool_call>{"name": "get"}</tool_call>').calls == [("get", "{}")]
    assert answer("llama3_json", '{"name": "get"}') == ('{"name": "get"}', "", [])
    assert answer("qwen3_coder", "<tool_call><function=get></function></tool_call>").calls == [("get", "{}")]


@pytest.mark.parametrize("arguments", ['"[]"', '"{n: 1}"', '"{} 1"', '"{"', "7", "[1]", "null", "{'n': 1}", "{n: 1}"])
def test_arguments_that_are_no_object_make_no_call(arguments):
    text = '<tool_call>{"name": "get", "arguments": ' + arguments + "}</tool_call>"
    assert answer("hermes", text) == (text, "", [])


def test_a_call_that_breaks_after_it_began_says_so_and_the_rest_is_text():
    text = '<tool_call>{"name": "get", "arguments": {"n": 1 oops}}</tool_call>'
    begin, *_, end, rest, _ = parse("hermes", text, TOOLS, [])
    assert isinstance(begin, CallBegin)
    assert end == CallEnd(0, False, "")
    assert rest == Text("oops}}</tool_call>")
    assert answer("hermes", text) == (text, "", [])


def test_a_call_after_a_broken_one_is_found():
    text = "<tool_call>no <tool_call>" + ONE_CALL["hermes"]
    assert answer("hermes", text) == ("<tool_call>no <tool_call>", "", [("get", '{"n": 1}')])


def test_objects_separated_by_semicolons_are_calls():
    text = '{"name": "get", "parameters": {"s": "; {"}}; {"name": "get_weather", "parameters": {}}'
    assert answer("llama3_json", text).calls == [("get", '{"s": "; {"}'), ("get_weather", "{}")]


def test_an_object_within_a_line_is_text():
    text = 'Write {"name": "get", "parameters": {}} and see'
    assert answer("llama3_json", text) == (text, "", [])


def test_an_answer_in_json_is_not_held():
    parser = make_parser(ParserNames("llama3_json"), "", TOOLS)
    assert whole_answer(parser.feed('{"city": [1')).text == '{"city": [1'


def test_a_call_inside_what_was_read_of_another_is_not_looked_for():
    inner = '\n{"name": "get", "parameters": {}}'
    for text in ('{"parameters": {"x": ' + inner, '{"parameters": {"x": ' + inner + "}, 7"):
        assert answer("llama3_json", text) == (text, "", [])


def test_code_after_the_python_tag_is_text():
    text = '<|python_tag|>brave_search.call(query="x")'
    assert answer("llama3_json", text) == (text, "", [])


def test_values_are_of_the_types_of_the_schema():
    properties = {
        "i": {"type": "integer"}, "f": {"type": "number"}, "b": {"type": "boolean"}, "o": {"type": "object"},
        "a": {"type": "array"}, "u": {"type": ["integer", "null"]}, "r": {"$ref": "#/$defs/x"}, "e": {"enum": [1, 2]},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "p": {"type": "integer"},
    }  # fmt: skip
    given = {
        "i": ("7", "7"), "f": ("1.50", "1.50"), "b": ("True", "true"), "o": ('{"k": [1]}', '{"k": [1]}'),
        "a": ("('x', 1)", '["x", 1]'), "u": ("None", "null"), "r": ("{'k': None}", '{"k": null}'), "e": ("2", "2"),
        "m": ("null", "null"), "p": ("+07", "7"), "unknown": ("7", '"7"'),
    }  # fmt: skip
    body = "".join(f"<parameter={key}>\n{raw}\n</parameter>\n" for key, (raw, _) in given.items())
    [(_, text)] = answer("qwen3_coder", f"<function=f>\n{body}</function>", {"f": {"properties": properties}}).calls
    assert text == "{" + ", ".join(f'"{key}": {made}' for key, (_, made) in given.items()) + "}"


def test_schemas_that_are_none_leave_all_values_text():
    for properties in (["a"], 5, {"a": 5}):
        [(_, text)] = answer(
            "qwen3_coder",
            "<function=f>\n<parameter=a>\n7\n</parameter>\n</function>",
            {"f": {"properties": properties}},
        ).calls
        assert text == '{"a": "7"}'


@pytest.mark.parametrize("kind", ["integer", "number", "boolean", "object", "array"])
@pytest.mark.parametrize("raw", ["seven", "NaN", "1e", "[" * 5000, "9" * 5000, "{1: {}, [}", "__import__('os')"])
def test_a_value_of_another_type_is_a_string(kind, raw):
    text = f"<function=f><parameter=x>{raw}</parameter></function>"
    [(_, made)] = answer("qwen3_coder", text, {"f": {"properties": {"x": {"type": kind}}}}).calls
    assert json.loads(made) == {"x": raw}


def test_messages_of_harmony():
    text = (
        "<|channel|>analysis<|message|>Think.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert answer("openai", text) == ("I look.Done.", "Think.", [("get", '{"n": 1}')])


@pytest.mark.parametrize(
    "message", ["functions.got<|channel|>commentary json<|message|>{}", "functions.get<|message|>7"]
)
def test_a_message_to_a_function_that_is_no_call_is_text_as_written(message):
    for text in (f" to={message}<|call|>", f"<|start|>assistant to={message}<|call|>"):
        assert answer("openai", text) == (text, "", [])


def test_harmony_goes_on_where_the_prompt_ends():
    parser = make_parser(ParserNames("openai"), "<|start|>assistant", TOOLS)
    events = parser.feed(' to=functions.get<|channel|>commentary json<|message|>{"n": 1}') + parser.close()
    assert whole_answer(events).calls == [("get", '{"n": 1}')]
    parser = make_parser(ParserNames("openai"), "<|start|>assistant<|channel|>analysis<|message|>So", TOOLS)
    assert parser.feed(" it is") == [Reasoning(" it is")]
    parser = make_parser(ParserNames("openai"), "<|start|>assistant", {})
    assert whole_answer(parser.feed("No marks at all") + parser.close()).text == "No marks at all"


def test_a_tool_of_the_models_own_is_reasoning_or_text():
    text = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    assert answer("openai", text) == ("", "1 + 1", [])
    text = "<|channel|>commentary to=browser.open<|message|>{}"
    assert answer("openai", text) == (text, "", [])


def test_blanks_after_the_last_call_are_dropped_and_before_text_are_kept():
    assert parse("hermes", ONE_CALL["hermes"] + "\n\n", TOOLS, [])[-2] == Mark("\n\n")
    assert parse("hermes", ONE_CALL["hermes"] + "\n\nx", TOOLS, [])[-2] == Text("\n\nx")
    assert answer("hermes", "\n").text == "\n"
