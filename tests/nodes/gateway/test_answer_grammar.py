"""Whatever is drawn under the grammar of a form of calls is read by its parser as valid calls."""

import json
import random
from typing import Any

import pytest

from nodes.asks import InvalidAsk, check_asks
from nodes.gateway.asked.answer_form import AnswerForm
from nodes.gateway.errors import ApiError, BadRequest
from nodes.gateway.jobs.constraints import with_calls
from nodes.gateway.jobs.validation import Job
from nodes.gateway.parsers import ParserNames
from tests.nodes.gateway.drawn_calls import (
    FORMS,
    TAILS,
    accepts,
    chat_with,
    check_calls,
    drawn,
    form,
    read,
    written,
)
from tests.nodes.gateway.drawn_parameters import drawn_tool

CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
TOOLS: Any = [
    {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": CITY, "days": DAYS}, "required": ["city"],
        "additionalProperties": False}},
    {"name": "note.add", "parameters": {
        "type": "object", "required": ["kind", "tags"], "additionalProperties": False,
        "properties": {"kind": {"$ref": "#/$defs/Kind"}, "tags": {"type": "array", "items": CITY, "maxItems": 2}},
        "$defs": {"Kind": {"type": "string", "enum": ["a", "b"]}}}},
]  # fmt: skip
PATTERN = {"type": "string", "pattern": "b"}
ROME, NOTE = ("weather", {"city": "Rome"}), ("note.add", {"kind": "a", "tags": []})


def chat(tools: Any = TOOLS, **fields: Any) -> Job:
    return chat_with(tools, **fields)


def called(text: str, job: Job, of: Any, tail: str) -> list[str]:
    """The names that an answer calls, each validly, and nothing beside them."""
    answer = read(text, job, of, tail)
    assert not answer.text.strip(), text
    return check_calls(answer.calls, TOOLS)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_required_calls_are_valid(name: str, has_tokens: bool) -> None:
    of, tail = form(name, has_tokens=has_tokens), TAILS.get(name, "")
    job = with_calls(chat(tool_choice="required"), of)
    for seed in range(8):
        text, is_over = drawn(job, of, seed, tail)
        assert is_over, text
        assert called(text, job, of, tail)
    several = written(of, ROME, NOTE, ROME)
    assert accepts(several, job, of) == (name != "openai")
    assert name == "openai" or called(several, job, of, tail) == ["weather", "note.add", "weather"]


@pytest.mark.parametrize("name", FORMS)
def test_a_named_call_is_that_one(name: str) -> None:
    of, tail = form(name), TAILS.get(name, "")
    job = with_calls(chat(tool_choice={"type": "function", "function": {"name": "note.add"}}), of)
    for seed in range(3):
        text, is_over = drawn(job, of, seed, tail)
        assert is_over
        assert called(text, job, of, tail) == ["note.add"]


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_strict_tool_leaves_text_free(name: str, has_tokens: bool) -> None:
    of = form(name, has_tokens=has_tokens)
    job = with_calls(chat([TOOLS[0] | {"strict": True}, TOOLS[1]]), of)
    says = "<|channel|>final<|message|>" if name == "openai" else ""
    assert accepts(says + "Let me see.", job, of)
    # These two write a call at once or not at all.
    before = "" if name in ("openai", "llama3_json") else "Let me see. "
    assert accepts(before + written(of, ("weather", {"city": "Rome", "days": 3})), job, of)
    assert not accepts(before + written(of, ("weather", {"city": "Bonn"})), job, of)
    assert not accepts(before + written(of, ("none", {})), job, of)
    assert accepts(before + written(of, ("note.add", {"kind": "x", "more": 1})), job, of), "it is not strict"


def test_only_allowed_tools_are_called_and_one_if_one_is_wanted() -> None:
    of = form("hermes")
    one, two = written(of, ROME), written(of, NOTE)
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    job = with_calls(chat(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}), of)
    assert [accepts(text, job, of) for text in ("Hm.", one, f"{one}\n{one}", two)] == [True, True, True, False]
    job = with_calls(chat(tool_choice="required", parallel_tool_calls=False), of)
    assert [accepts(text, job, of) for text in ("Hm.", one, two, f"{one}\n{two}")] == [False, True, True, False]
    assert chat() == with_calls(chat(), of), "nothing to enforce"


def test_an_answer_by_a_schema_or_a_call() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOLS[0]["parameters"]}}
    for name, before in (("hermes", ""), ("openai", "<|channel|>final<|message|>")):
        of = form(name, has_tokens=True)
        job = with_calls(chat(response_format=wanted), of)
        call = written(of, ROME)
        texts = (before + '{"city": "Rome"}', call, before + "Rome", call.replace("weather", "none"))
        assert [accepts(text, job, of) for text in texts] == [True, True, False, False]
        job = with_calls(chat(response_format=wanted, tool_choice="required"), of)
        assert [accepts(text, job, of) for text in texts] == [False, True, False, False]
    with pytest.raises(ApiError) as caught:
        with_calls(chat(regex="a+"), form("hermes"))
    assert caught.value.param == "regex"


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_grammar_begins_after_reasoning(has_tokens: bool) -> None:
    job = chat([], response_format={"type": "json_object"})
    qwen, deepseek = (form("none", name, has_tokens=has_tokens) for name in ("qwen3", "deepseek_r1"))
    opened, closed, bare = "assistant\n<think>\n", "<think>\n\n</think>\n\n", "assistant\n"
    thought = 'say {"a": 1}?\n</think>\n\n'
    assert accepts(thought + "{}", job, qwen, opened)
    assert accepts("{}", job, qwen, closed)
    assert not accepts(thought + "{}", job, qwen, closed)
    assert accepts("{}", job, qwen, bare)
    assert accepts("<think>\n" + thought + "{}", job, qwen, bare)
    assert not accepts(thought + "{}", job, qwen, bare)
    assert accepts(thought + "{}", job, deepseek, bare), "it may leave out the opening mark"
    assert not accepts(thought + "Hm.", job, qwen, opened)
    hermes = form("hermes", "qwen3", has_tokens=has_tokens)
    required = with_calls(chat(tool_choice="required"), hermes)
    call = written(hermes, ROME)
    assert accepts(thought + call, required, hermes, opened)
    assert not accepts("Hm. " + call, required, hermes, closed)


def test_a_grammar_begins_after_a_message_of_reasoning() -> None:
    of, tail = form("openai", "openai_gptoss", has_tokens=True), "<|start|>assistant"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    told = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    job = with_calls(chat(tool_choice="required"), of)
    call = written(of, ROME)
    for before in ("", thought, thought + told):
        assert accepts(before + call, job, of, tail)
    assert not accepts(thought + "<|channel|>final<|message|>Hm.", job, of, tail)
    begun = tail + "<|channel|>analysis<|message|>"
    assert accepts("Hm.<|end|><|start|>assistant" + call, job, of, begun)
    final = "<|channel|>final<|message|>"
    answer = chat([], response_format={"type": "json_object"})
    assert accepts(thought + final + "{}", answer, of, tail)
    assert accepts("{}", answer, of, tail + final)
    assert not accepts(thought + "{}", answer, of, tail)


@pytest.mark.parametrize(
    ("name", "parameters", "why"),
    [
        ("hermes", {"type": "string"}, "they are an object, and the schema's type is"),
        ("hermes", {"type": "object", "properties": {"a": {"const": 2**70 + 1}}}, "is no double"),
        ("qwen3_coder", {"type": "object", "properties": {"a>b": {}}}, "cannot write the name 'a>b'"),
        ("qwen3_coder", {"type": "object", "required": ["a"]}, "nothing describes the required parameter 'a'"),
        ("qwen3_coder", {"type": "object", "required": ["a"], "properties": {"a": {"type": "boolean", "enum": ["x"]}}},
         "no value fits the required parameter 'a'"),
        ("qwen3_coder", {"type": "object", "properties": 5}, "'properties' is no object"),
        ("qwen3_coder", {"type": "object", "required": True}, "'required' is no list of names"),
        ("qwen3_coder", {"type": "object", "properties": {"a": PATTERN}},
         "'pattern' of a text cannot be enforced"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "minLength": 2}, {}]}}},
         "'minLength' of a text cannot be enforced"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": ["string", "integer"], "minimum": 2}}},
         "'minimum' of a text cannot be enforced"),
        ("qwen3_coder", {"properties": {"a": {"$ref": "#/$defs/x%20y"}}, "$defs": {"x y": PATTERN}},
         "'pattern' of a text cannot be enforced"),
        ("qwen3_coder", {"properties": {"'a'": {}}}, "cannot write the name"),
        ("qwen3_coder", {"properties": {"a": {}}, "minProperties": 1},
         "'minProperties' of all arguments cannot be enforced"),
        ("qwen3_coder", {"anyOf": [{"properties": {"a": {"type": kind}}} for kind in ("string", "integer")]},
         "'a' is any text in one alternative, and something else in another"),
        ("qwen3_coder", {"allOf": [{"anyOf": [{}] * 9}] * 2}, "there are more than 64 ways to write them"),
        *((name, parameters, why) for name in FORMS for parameters, why in (
            ({"properties": {"a": {"$ref": "#/$defs/x~1y"}}}, r"'#/\$defs/x~1y', where the schema has none"),
            ({"items": {"$ref": "x.json"}}, r"'\$ref' is 'x.json', which is outside of the schema"),
            ({"$ref": "#"}, r"'\$ref' is '#', which leads back to itself"))),
    ],
)  # fmt: skip
def test_what_no_grammar_describes(name: str, parameters: Any, why: str) -> None:
    job = chat([{"name": "f", "parameters": parameters, "strict": True}])
    with pytest.raises(ApiError, match=f"of 'f' cannot be kept to .*: .*{why}") as caught:
        with_calls(job, form(name))
    assert (caught.value.status, caught.value.param) == (400, "tools.0.function.parameters")
    plain = chat([{"name": "f", "parameters": parameters}])
    assert with_calls(plain, form(name)) == plain, "it is no matter where nothing is enforced"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("key", ["anyOf", "allOf"])
def test_a_schema_that_is_nested_too_deeply_is_refused_by_the_check(name: str, key: str) -> None:
    schema: Any = {"type": "string"}
    for _ in range(400):
        schema = {key: [schema]}
    parameters = {"type": "object", "properties": {"a": schema}}
    job = chat([{"name": "f", "parameters": parameters, "strict": True}])
    checks = with_calls(job, form(name)).prepare.checks
    with pytest.raises(InvalidAsk, match="recursion limit") as caught:
        check_asks(checks)
    assert caught.value.param == "tools.0.function.parameters"


def test_a_property_without_a_value_is_left_out() -> None:
    properties = {
        "a": {"type": "boolean", "enum": ["x"]},
        "b": {"type": "integer", "enum": [1, "x"]},
        "c": {"type": "array", "enum": ["x"]},
    }
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    for name in ("hermes", "qwen3_coder"):
        job = with_calls(chat([tool], tool_choice="required"), form(name))
        check_asks(job.prepare.checks)
        assert [accepts(written(form(name), ("f", {"b": one})), job, form(name)) for one in (1, 2)] == [True, False]


@pytest.mark.parametrize("name", FORMS)
def test_whatever_schema_programs_write_is_enforced(name: str) -> None:
    check_drawn(name, range(12))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FORMS)
def test_three_hundred_schemas_as_programs_write_them_are_enforced(name: str) -> None:
    check_drawn(name, range(300))


def check_drawn(name: str, seeds: range) -> None:
    """A call has to be written, and each valid one may be: required, and if the tool is strict."""
    of, tail = form(name), TAILS.get(name, "")
    for seed in seeds:
        parameters, arguments = drawn_tool(random.Random(seed))
        tool = {"name": "f", "parameters": parameters}
        required = with_calls(chat([tool], tool_choice="required"), of)
        strict = with_calls(chat([tool | {"strict": True}]), of)
        for job in (required, strict):
            check_asks(job.prepare.checks)
            assert accepts(written(of, ("f", arguments)), job, of), (parameters, arguments)
        text, is_over = drawn(required, of, seed, tail)
        assert is_over, (parameters, text)
        assert check_calls(read(text, required, of, tail).calls, [tool]), (parameters, text)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "parameters",
    [
        # As zod 3 writes a schema that has a name.
        {"$ref": "#/definitions/Args", "$schema": "http://json-schema.org/draft-07/schema#", "definitions": {
            "Args": {"properties": {"a": {"type": "integer"}, "of": {"$ref": "#"}}, "required": ["a"]}}},
        {"$schema": "https://json-schema.org/draft-07/schema#", "properties": {"a": {"type": "integer"}}},
        {"$schema": "https://example.com/dialect", "$id": "tool", "properties": {"a": {"$ref": "tool#/$defs/n"}},
         "$defs": {"n": {"type": "integer"}}},
    ],
)  # fmt: skip
def test_what_stands_beside_a_schema(name: str, parameters: Any) -> None:
    of = form(name)
    for fields in ({"tool_choice": "required"}, {}):
        job = with_calls(chat([{"name": "f", "parameters": parameters, "strict": True}], **fields), of)
        check_asks(job.prepare.checks)
        assert [accepts(written(of, ("f", {"a": a})), job, of) for a in (7, "x")] == [True, False]


def test_a_tool_without_parameters_is_called() -> None:
    for name in FORMS:
        job = with_calls(chat([{"name": "f", "parameters": {}}], tool_choice="required"), form(name))
        check_asks(job.prepare.checks)
        assert accepts(written(form(name), ("f", {})), job, form(name))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_arguments_of_which_a_tool_has_alternatives(name: str) -> None:
    ways = [
        {"properties": {"kind": {"const": "city"}, "city": {"type": "string"}}, "required": ["kind", "city"]},
        {"$ref": "#/$defs/Point"},
    ]
    point = {"properties": {"kind": {"const": "point"}, "x": {"type": "number"}}, "required": ["kind", "x"]}
    parameters = {"type": "object", "oneOf": ways, "$defs": {"Point": point}}
    of = form(name)
    job = with_calls(chat([{"name": "f", "parameters": parameters}], tool_choice="required"), of)
    check_asks(job.prepare.checks)
    for arguments, is_valid in (
        ({"kind": "city", "city": "Rome"}, True),
        ({"kind": "point", "x": 7}, True),
        ({"kind": "point", "city": "Rome"}, False),
        ({"kind": "city"}, False),
    ):
        assert accepts(written(of, ("f", arguments)), job, of) == is_valid
    for seed in range(6):
        text, is_over = drawn(job, of, seed, "")
        assert is_over
        assert check_calls(read(text, job, of, "").calls, [{"name": "f", "parameters": parameters}])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_pattern_that_no_grammar_takes_is_left_out_unless_the_tool_is_strict(name: str) -> None:
    # As zod 4 writes an email; no model is asked for what a server of tools wrote.
    email = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@([a-z]+\.)+[a-z]{2,}$"}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"to": {"type": "array", "items": email}}}}
    of = form(name)
    job = with_calls(chat([tool], tool_choice="required"), of)
    check_asks(job.prepare.checks)
    assert [accepts(written(of, ("f", {"to": [to]})), job, of) for to in ("a@b.de", "a")] == [True, False]
    strict = with_calls(chat([tool | {"strict": True}]), of)
    with pytest.raises(InvalidAsk, match=r"the regular expression .*: look-around, .* is not supported") as caught:
        check_asks(strict.prepare.checks)
    assert caught.value.param == "tools.0.function.parameters"


def test_properties_that_a_part_forbids_are_not_written() -> None:
    parameters = {
        "allOf": [
            {"properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False},
            {"properties": {"a": {"minimum": 3}, "c": {"type": "string"}}, "required": ["a"]},
        ]
    }
    of = form("qwen3_coder")
    job = with_calls(chat([{"name": "f", "parameters": parameters}], tool_choice="required"), of)
    given = [{"a": 3}, {"a": 2}, {"a": 3, "b": "x"}, {"a": 3, "c": "x"}]
    assert [accepts(written(of, ("f", one)), job, of) for one in given] == [True, False, True, False]


N_OBJECT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "integer"}, {"7": 7, "9" * 100: int("9" * 100)}, ["seven"]),
        ({"type": ["string", "null"]}, {"Rome": "Rome", "null": None, "": ""}, []),
        ({"type": ["string", "null"], "enum": ["Rome", None, "null"]}, {"Rome": "Rome", "null": None}, ["Oslo"]),
        ({"allOf": [{"$ref": "#/$defs/City"}], "title": "where"}, {"Rome": "Rome"}, ["Oslo", '"Rome"']),
        ({"anyOf": [{"enum": ["Rome"]}, {"type": "integer"}]}, {"Rome": "Rome", "7": 7}, ["Oslo", "[7]"]),
        ({"anyOf": [{"type": "string"}, N_OBJECT]}, {"Rome": "Rome", '{"n": 7}': {"n": 7}}, ['{"m": 7}', "[7]"]),
        ({"allOf": [{"type": "string"}, {"enum": ["Rome", 7]}]}, {"Rome": "Rome"}, ["Oslo", "7"]),
        ({"const": "Rome"}, {"Rome": "Rome"}, ["Oslo"]),
        ({"const": 7}, {"7": 7}, ["8", "seven"]),
        ({"type": "string", "enum": ["Rome", 7]}, {"Rome": "Rome"}, ["7"]),
    ],
)  # fmt: skip
def test_values_in_lines_are_read_as_the_schema_says(schema: Any, values: dict[str, Any], others: list[str]) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"City": {"enum": ["Rome"]}},
    }
    of = form("qwen3_coder")
    job = with_calls(chat([{"name": "f", "parameters": parameters}], tool_choice="required"), of)
    check_asks(job.prepare.checks)
    for raw, value in values.items():
        text = written(of, ("f", {"a": raw}))
        assert accepts(text, job, of), raw
        [call] = read(text, job, of, "").calls
        assert json.loads(call.arguments) == {"a": value}
    assert not [raw for raw in others if accepts(written(of, ("f", {"a": raw})), job, of)]


@pytest.mark.parametrize("schema", [{"type": "string"}, {"anyOf": [{"type": "string"}, N_OBJECT]}])
def test_a_text_in_lines_ends_with_the_first_mark(schema: Any) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    of = form("qwen3_coder")
    job = with_calls(chat([tool], tool_choice="required"), of)
    text = written(of, ("f", {"a": "Rome"}))
    for ends, value in ((text, "Rome"), (text.replace("Rome\n", "Rome"), "Rome"), (text.replace("Rome\n", ""), "")):
        assert accepts(ends, job, of)
        assert [json.loads(call.arguments) for call in read(ends, job, of, "").calls] == [{"a": value}]
    for goes_on in (text.replace("Rome", text), text.replace("Rome\n", text), text.replace("Rome", "R\n<parameter=b>")):
        assert not accepts(goes_on, job, of)


def test_a_line_that_cannot_be_compiled_is_refused_by_the_check_of_its_tool() -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}}
    tools = [TOOLS[0], {"name": "f", "parameters": wrong}]
    with pytest.raises(InvalidAsk, match=r"minimum \(5\) is greater than maximum") as caught:
        check_asks(with_calls(chat(tools, tool_choice="required"), form("qwen3_coder")).prepare.checks)
    assert caught.value.param == "tools.1.function.parameters"


def test_tools_over_the_limit_of_what_is_asked_of_draws() -> None:
    tools = [{"name": f"f{n}", "parameters": {"enum": ["x" * 600], "type": "object"}} for n in range(128)]
    assert with_calls(chat(tools), form("hermes"))
    with pytest.raises(ApiError, match="bytes; at most 65536 can be served") as caught:
        with_calls(chat(tools, tool_choice="required"), form("hermes"))
    assert caught.value.param == "tools"


def test_a_schema_that_cannot_be_compiled_is_refused_by_the_check() -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"const": 1}}}, "required": ["a"]}
    tool = {"name": "f", "parameters": parameters}
    for strict in (False, True):
        checks = with_calls(chat([tool | {"strict": strict}], tool_choice="required"), form("hermes")).prepare.checks
        if strict:
            with pytest.raises(InvalidAsk, match=r"Unimplemented keys: ..not") as caught:
                check_asks(checks)
            assert caught.value.param == "tools.0.function.parameters"
        else:
            assert check_asks(checks) == ['Unimplemented keys: ["not"]'] * 2


@pytest.mark.parametrize(("fields", "param"), [({"tool_choice": "required"}, "tool_choice"), ({}, "tools")])
def test_a_parser_without_a_form_cannot_be_enforced(fields: dict[str, Any], param: str) -> None:
    of = AnswerForm(ParserNames("theirs", None), shows_tools=True)
    with pytest.raises(BadRequest, match="parser 'theirs'") as refused:
        with_calls(chat([TOOLS[0] | {"strict": True}], **fields), of)
    assert refused.value.param == param
