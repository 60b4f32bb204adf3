"""A call that is valid by its tool's schema, rendered in each form as its template does, is read as it was meant.

Whatever schema said it and wherever the answer is cut. And what is read of any text is JSON to all readers.
"""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.asks.schema_annotations import MAX_SCHEMAS, TooManySchemas
from nodes.gateway.parsers.parameters import Allowed, Parameters
from nodes.gateway.parsers.xml_values import json_of
from tests.nodes.gateway.drawn_parameters import drawn_tool
from tests.nodes.gateway.parsers.whole import whole_answer
from tests.nodes.gateway.parsers.written import FORMS, WRITE, garbage, parse


def strictly(text: str) -> Any:
    """JSON without what Python takes beyond it, and bytes that any client can decode."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    text.encode()
    return json.loads(text, parse_constant=refuse)


def rendered(value: Any, dice: random.Random) -> str:
    """As JSON, or as the template of Qwen3-Coder renders it: containers as JSON, all else as Python's str."""
    return json.dumps(value, ensure_ascii=dice.random() < 0.5) if isinstance(value, dict | list) else str(value)


def check(form: str, seed: int) -> None:
    dice = random.Random(seed)
    tool = drawn_tool(dice)
    tools = {"get": tool.parameters, "other": {}}
    dumps = rendered if form == "qwen3_coder" and dice.random() < 0.5 else lambda one, _: json.dumps(one)
    text = WRITE[form]([("get", tool.arguments)] * dice.choice([1, 2]), lambda one: dumps(one, dice))
    if form == "qwen3_coder" and not any("\n" in str(one) for one in tool.arguments.values()):
        text = text.replace("\n", dice.choice(["\n", "\r\n"]))
    cuts = sorted(dice.sample(range(len(text)), min(len(text), dice.choice([0, 1, 5, len(text)]))))
    for pieces in ([], cuts):
        calls = whole_answer(parse(form, text, tools, pieces)).calls
        assert calls, text
        for call in calls:
            read = strictly(call.arguments)
            assert json.dumps(read) == json.dumps(tool.arguments), (tool.parameters, text)


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=100)
def test_a_valid_call_is_read_as_it_was_meant(form: str, seed: int) -> None:
    check(form, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
def test_three_thousand_valid_calls_are_read_as_they_were_meant(form: str) -> None:
    for seed in range(3000):
        check(form, seed)


RAW = st.one_of(
    st.text(),
    st.lists(st.sampled_from([
        "NaN", "Infinity", "-", "[", "]", "{", "}", '"', "'", "1", "e9", ",", ":", "None", "\\ud800", "True", "null",
        " ", "\n", "(", ")", ".", "nan", "inf", "1e999", "\x00",
    ])).map("".join),
)  # fmt: skip
WORDS = [
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "object",
    "array",
    "int64",
    "float",
    "dict",
    "list",
    "any",
    "",
]


@given(RAW, st.sets(st.sampled_from(WORDS)), st.booleans())
@settings(max_examples=500)
def test_any_value_is_json(raw: str, types: set[str], is_listed: bool) -> None:
    allowed = Allowed(frozenset(types), ("a", "1") if is_listed else None, (1, None) if is_listed else None)
    strictly(json_of(raw, allowed))


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_any_arguments_are_json(form: str, seed: int) -> None:
    dice = random.Random(seed)
    tool = drawn_tool(dice)
    text = WRITE[form]([("get", tool.arguments)], json.dumps)
    odd = (
        "NaN",
        "-Infinity",
        "\n",
        "\t",
        "\x01",
        '"',
        "'",
        "{",
        "}",
        "null",
        "\\ud800",
        "<parameter=n>",
        "1e9",
        garbage(dice),
    )
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(text))
        text = text[:at] + dice.choice(odd) + text[at + dice.randrange(3) :]
    for call in whole_answer(parse(form, text, {"get": tool.parameters})).calls:
        assert isinstance(strictly(call.arguments), dict)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/a%20b"}, {"number"}),
        ({"$ref": "#/properties/g"}, {"integer"}),
        ({"$ref": "#here"}, {"boolean"}),
        ({"$ref": "#/$defs/chain"}, {"integer"}),
        ({"$ref": "#"}, {"object"}),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}], "description": "d"}, {"integer"}),
        ({"$ref": "#/$defs/a~1b", "minimum": 1}, {"integer"}),
        ({"anyOf": [{"$ref": "#/properties/g"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "null"}, {"allOf": [{"$ref": "#/$defs/a~1b"}]}]}, {"integer", "null"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "integer", "anyOf": [{"minimum": 1}, {"maximum": -1}]}, {"integer"}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}),
        ({"const": 7}, {"integer"}),
        ({"enum": [1, 2.5, None]}, {"integer", "number", "null"}),
        ({"anyOf": [{"const": "a"}, {"const": 1}]}, {"string", "integer"}),
        ({"properties": {"a": {}}}, {"object"}),
        ({"items": {"type": "string"}}, {"array"}),
        ({"$ref": "#/$defs/loop"}, {"string"}),
        ({"$ref": "#/$defs/one"}, {"integer", "null"}),
        ({"$ref": "#/$defs/other"}, {"integer", "null"}),
        ({"$ref": "#/$defs/many"}, {"string"}),
        ({"$ref": "#/nowhere"}, {"object"}),
        ({"$ref": "https://example.com/x.json"}, {"object"}),
        ({}, {"string"}),
        (True, {"string"}),
        (5, {"string"}),
    ],
)  # fmt: skip
def test_types_of_a_parameter(schema: Any, types: set[str]) -> None:
    whole = {
        "properties": {"x": schema, "g": {"type": "integer"}},
        "$defs": {
            "a/b": {"type": "integer"}, "a b": {"type": "number"}, "b": {"$anchor": "here", "type": "boolean"},
            "chain": {"$ref": "#/$defs/link"}, "link": {"$ref": "#/$defs/a~1b"}, "loop": {"$ref": "#/$defs/loop"},
            "one": {"anyOf": [{"$ref": "#/$defs/other"}, {"type": "integer"}]},
            "other": {"anyOf": [{"$ref": "#/$defs/one"}, {"type": "null"}]},
            # Were it followed as far as names go, no clock would see the end.
            "many": {"anyOf": [{"type": "string"}, *[{"$ref": "#/$defs/many"}] * 12]},
        },
    }  # fmt: skip
    assert Parameters(whole).of_key("x").types == types
    assert Parameters({"$ref": "#/$defs/Args", "$defs": {**whole["$defs"], "Args": whole}}).of_key("g").types == {
        "integer"
    }


@pytest.mark.parametrize(
    ("whole", "types"),
    [
        ({"additionalProperties": {"type": "integer"}}, {"integer"}),
        ({"additionalProperties": False}, {"string"}),
        ({"allOf": [{"properties": {"x": {"type": "integer"}}}, {"required": ["x"]}]}, {"integer"}),
        ({"anyOf": [{"properties": {"x": {"type": kind}}} for kind in ("integer", "null")]}, {"integer", "null"}),
        ({"properties": ["x"]}, {"string"}),
        ({"properties": {"x": {"type": "integer"}}, "required": 5}, {"string"}),
        ({"$ref": "#/none", "properties": {"x": {"type": "integer"}}}, {"string"}),
        ({"$ref": "#"}, {"string"}),
        ({"allOf": [{"anyOf": [{"properties": {"x": {"type": "integer"}}}] * 9}] * 9}, {"string"}),
    ],
)  # fmt: skip
def test_where_a_tool_says_what_a_parameter_is(whole: Any, types: set[str]) -> None:
    assert Parameters(whole).of_key("x").types == types


def test_schemas_are_looked_at_in_bounded_time() -> None:
    refs = [{"$ref": f"#/$defs/{number}"} for number in range(99)]
    parameters = Parameters({"$defs": {str(number): {"anyOf": [*refs, {"type": "integer"}]} for number in range(99)}})
    # Of all ways through them no clock would see the end.
    assert parameters.allowed({"anyOf": refs}).types == {"integer"}
    many = {"anyOf": [{"type": "integer"} for _ in range(MAX_SCHEMAS)]}
    with pytest.raises(TooManySchemas):
        Parameters({}).allowed(many)
    assert Parameters({"properties": {"x": many}}).of_key("x").types == {"string"}
