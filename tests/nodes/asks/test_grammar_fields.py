"""The fields of structured output: what they mean, what of them is refused, and what the check of a tokenizer finds."""

import json
from typing import Any

import msgspec
import pytest

from nodes.asks import InvalidAsk, check_asks, field_of, grammar_text
from nodes.asks.grammar_text import _unanchored
from nodes.asks.schema_annotations import MAX_SCHEMAS, TooManySchemas, is_enforceable, without_annotations
from nodes.request import Asked
from tests.nodes.asks.grammars import schema_of, sent

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
TAGS = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": ""}], "triggers": ["<a"]}
TAGS_TEXT = '{"triggers":["<a"],"structures":[["<a>",' + TEXT + ',""]]}'
NAMED = "response_format.json_schema.schema"


def value_of(asks: list[Asked]) -> list[Any]:
    [one] = asks
    assert one.name == "grammar/2"
    return msgspec.msgpack.decode(one.value)


@pytest.mark.parametrize(
    ("given", "kind", "text", "param"),
    [
        ({"response_format": schema_of(SCHEMA)}, "json", TEXT, NAMED),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": TEXT}}}, "json", TEXT, NAMED),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "json", '{"type":"object"}', NAMED),
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}', "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", TEXT, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": None}}, "json", '{"type":"object"}', "response_format"),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "tags", TAGS_TEXT, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT, "json_object": False}}, "json", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type":"object"}', "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b."]}}, "regex", r"a|b\.", "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, "grammar", "x", "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "tags", TAGS_TEXT,
         "structured_outputs.structural_tag"),
        ({"json_schema": TEXT}, "json", TEXT, "json_schema"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "x"}, "grammar", "x", "ebnf"),
        ({"grammar": "x"}, "grammar", "x", "grammar"),
        ({"structural_tag": json.dumps({"type": "structural_tag", **TAGS})}, "tags", TAGS_TEXT, "structural_tag"),
        ({"guided_json": SCHEMA}, "json", TEXT, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "regex", "a", "guided_choice"),
        ({"guided_grammar": "x"}, "grammar", "x", "guided_grammar"),
    ],
)  # fmt: skip
def test_fields(given: dict[str, Any], kind: str, text: str, param: str) -> None:
    asks = sent(**given)
    assert value_of(asks) == [kind, text, param, False, False, ""]
    assert asks[0].looks_back
    assert field_of(asks[0]) == param


def test_what_asks_for_nothing() -> None:
    assert sent(response_format={"type": "text"}) == sent(grammar="") == []
    assert value_of(sent(regex="a", ignore_eos=True))[4] is True
    assert value_of(sent(response_format=schema_of(SCHEMA, strict=True)))[3] is True
    assert field_of(Asked("unknown/1", False, b"")) is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"regex": "a", "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"structural_tag": "[]"}, "structural_tag"),
        ({"structural_tag": "{"}, "structural_tag"),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag"),
        ({"structural_tag": {**TAGS, "triggers": ["<b"]}}, "structural_tag.structures.0.begin"),
        ({"guided_json": {"a": "x" * 70_000}}, "guided_json"),
        ({"regex": "x" * 70_000}, "regex"),
        ({"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000}, "json_schema"),
        ({"guided_json": {"anyOf": [{}] * (MAX_SCHEMAS + 1)}}, "guided_json"),
    ],
)  # fmt: skip
def test_what_is_refused_at_once_names_its_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidAsk) as raised:
        sent(**given)
    assert raised.value.param == param


def test_annotations_are_cut_and_properties_of_their_names_are_not() -> None:
    schema = {
        "title": "T", "$comment": "c", "x-guidance": {"lenient": True}, "$defs": {"default": {"description": "d"}},
        "properties": {
            "title": {"type": "string", "examples": ["e"], "default": 1},
            "anyOf": {"anyOf": [{"title": "x", "enum": [{"title": "kept"}]}], "items": {"default": 0, "const": 1}},
        },
        "prefixItems": [True, {"deprecated": True}], "items": False,
        "dependencies": {"a": ["b"], "c": {"title": "t"}}, "unknown": {"title": "kept"},
        "contains": {"$ref": "#/$defs/default"},
    }  # fmt: skip
    assert without_annotations(schema) == {
        "$defs": {"0": {}}, "contains": {"$ref": "#/$defs/0"},
        "properties": {
            "title": {"type": "string"},
            "anyOf": {"anyOf": [{"enum": [{"title": "kept"}]}], "items": {"const": 1}},
        },
        "prefixItems": [True, {}], "items": False,
        "dependencies": {"a": ["b"], "c": {}}, "unknown": {"title": "kept"},
    }  # fmt: skip
    assert [*without_annotations({"properties": {"z": {}, "a": {}}})["properties"]] == ["z", "a"]
    with pytest.raises(TooManySchemas):
        without_annotations({"anyOf": [{}] * (MAX_SCHEMAS + 1)})


@pytest.mark.parametrize(
    ("pattern", "is_taken"),
    [
        (r"^\d{4}-\d\d$", True), (r"^https?:\/\/[\w\-.]+$", True), (r"(?:a|b)(?<year>c)", True), (r"\(?=a", True),
        (r"[(?=]", True), (r"[\]1(?!]", True), (r"\\1", True), (r"^\p{L}+\u4e00$", True),
        (r"(?=a)", False), (r"a(?!b)", False), (r"(?<=a)b", False), (r"(?<!a)b", False), (r"(a)\1", False),
        (r"\bfoo\b", False), (r"(?<y>a)\k<y>", False), (r"\\\1", False), (r"[a]\1", False), (r"\cJ", False),
    ],
)  # fmt: skip
def test_patterns_that_grammars_take(pattern: str, is_taken: bool) -> None:
    assert is_enforceable(pattern) == is_taken
    schema = {"items": {"type": "string", "pattern": pattern}}
    kept = without_annotations(schema, with_all_patterns=False)["items"]
    assert kept == (schema["items"] if is_taken else {"type": "string"})
    strict = sent(response_format=schema_of(schema, strict=True))
    if is_taken:
        check_asks(strict)
    else:
        with pytest.raises(InvalidAsk):
            check_asks(strict)
        assert check_asks(sent(guided_json=schema)) == ["Patterns that look around, or back at a group"]


def test_what_only_the_library_knows_of_is_not_told() -> None:
    wrong = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "format": "email", "pattern": "^[0-9]+$"}}}
    with pytest.raises(InvalidAsk) as raised:
        check_asks(sent(guided_json=wrong))
    told = "'guided_json' cannot be compiled: Unsatisfiable schema: no text fits all that is said of it."
    assert raised.value.message == told


def test_a_keyword_that_is_null_is_none() -> None:
    nulls = dict.fromkeys(("required", "properties", "items", "additionalProperties", "anyOf", "enum", "minLength"))
    schema: dict[str, Any] = {**nulls, "type": "object", "properties": {"a": {**nulls, "const": None}}}
    assert without_annotations(schema) == {"type": "object", "properties": {"a": {"const": None}}}


# What zod 4 writes for an address of mail.
_ZOD_MAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize("pattern", [_ZOD_MAIL, "a(?<=b)", "(?<!a)b", r"(a)[(]\1", r"(?<x>a)\k<x>"])
def test_a_pattern_that_looks_around_is_ignored_unless_strict(pattern: str) -> None:
    schema = {"properties": {"enum": {"anyOf": [{"type": "string", "maxLength": 9, "pattern": pattern}]}}}
    assert check_asks(sent(guided_json=schema)) == ["Patterns that look around, or back at a group"]
    assert check_asks(sent(structural_tag={**TAGS, "structures": [{**TAGS["structures"][0], "schema": schema}]})) == []
    with pytest.raises(InvalidAsk, match=r"look-around|backreferences|unrecognized") as raised:
        check_asks(sent(response_format=schema_of(schema, strict=True)))
    assert raised.value.param == NAMED


@pytest.mark.parametrize("pattern", [r"^\(\?!a$", "^[(?=]a$", r"^[\]\\(?=]$", "^(?:a)(?<x>b)$", r"^\\1$"])
def test_what_only_looks_like_it_is_kept(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern, "const": {"pattern": "(?=a)"}, "enum": [{"pattern": "(?=a)"}]}
    assert without_annotations(schema, with_all_patterns=False) == schema
    assert check_asks(sent(guided_json={"type": "string", "pattern": pattern})) == []


def test_a_schema_counts_without_its_annotations() -> None:
    described = {**SCHEMA, "description": "x" * 100_000}
    assert value_of(sent(guided_json=described))[1] == TEXT


@pytest.mark.parametrize(
    ("regex", "bare"), [("^a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("^", ""), ("$", ""), (r"\^a", r"\^a")]
)
def test_anchors_are_left_out(regex: str, bare: str) -> None:
    assert _unanchored(regex) == bare


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {}}, '"not"'),
        ({"if": {}}, '"if"'),
        ({"contains": {}}, "contains"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"type": "string", "format": "of-ours"}, "of-ours"),
        ({"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}, "uniqueItems"),
    ],
)
def test_what_cannot_be_enforced_is_refused_if_strict_and_else_told(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidAsk, match=word) as raised:
        check_asks(sent(response_format=schema_of(schema, strict=True)))
    assert (raised.value.code, raised.value.param) == ("unsupported_schema", NAMED)
    [note] = check_asks(sent(response_format=schema_of(schema)))
    assert word in note


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"guided_json": {"$ref": "#"}}, "'#', which leads back to itself"),
        ({"guided_json": {"$ref": "http://localhost/x"}}, "'http://localhost/x', which is outside of the schema"),
        ({"guided_json": {"items": {"$ref": "/$defs/a"}, "$defs": {"a": {}}}}, "outside of the schema"),
        ({"guided_json": {"items": {"$ref": "#/$defs/a"}}}, "where the schema has none"),
        ({"guided_json": {"$ref": 7}}, "'7', which is no text"),
        ({"guided_json": {"type": "foo"}}, "Invalid type"),
        ({"guided_json": {"enum": []}}, "Unsatisfiable"),
        ({"guided_json": {"type": "string", "pattern": "[ab"}}, "unclosed"),
        ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "recursion limit"),
        ({"regex": r"[^\s\S]"}, "no text matches"),
        ({"regex": "("}, "cannot be compiled"),
        ({"ebnf": "root = 1"}, "Expected ::="),
        ({"ebnf": ""}, "root"),
        ({"ebnf": "root ::= root"}, "no text matches"),
        ({"guided_grammar": "start: nobody"}, "cannot be compiled"),
        ({"guided_json": {"type": "object", "properties": {f"a{i}": {} for i in range(1000)}}}, "row has|complex"),
    ],
)
def test_what_no_worker_could_serve(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidAsk, match=words) as raised:
        check_asks(sent(**given))
    assert (raised.value.code, raised.value.param) == ("invalid_value", next(iter(given)))
    assert len(raised.value.message) < 500


def test_what_takes_too_long_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_text, "MAX_COMPILE_S", 0.0)
    with pytest.raises(InvalidAsk, match="'regex' is too complex: it takes") as raised:
        check_asks(sent(regex="a+"))
    assert raised.value.param == "regex"


@pytest.mark.parametrize(
    "given",
    [
        {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
        {"guided_json": {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(300)}}},
        {"regex": ""},
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"guided_grammar": "start: <|tool|> /a*/"},
        {"structural_tag": TAGS},
        {"guided_choice": [f"choice {i}" for i in range(3000)]},
    ],
)
def test_what_passes(given: dict[str, Any]) -> None:
    assert [note for note in check_asks(sent(**given)) if "special_token" not in note] == []


def test_asks_without_a_check_pass() -> None:
    assert check_asks(sent(presence_penalty=1.0)) == []
    assert check_asks([Asked("unknown/1", False, b"")]) == []


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2}),
        ({"maximum": 2**53 + 1}, {"maximum": 2**53}),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": 1024 - 2**63, "maximum": 2**63 - 1024}),
        ({"minimum": 0, "maximum": 2**64 - 1}, {"minimum": 0, "maximum": 2**63 - 1024}),
        ({"exclusiveMinimum": 2**53}, {"minimum": 2**53 + 2}),
        ({"maximum": 1e300, "exclusiveMinimum": 1e17}, {"maximum": 2**63 - 1024, "minimum": 10**17 + 16}),
        ({"exclusiveMaximum": 2**60, "maximum": 7}, {"maximum": 7}),
        ({"properties": {"minimum": {"maximum": 2**70}}}, {"properties": {"minimum": {"maximum": 2**63 - 1024}}}),
        ({"enum": [2**60, -(2**53), 1.5, True]}, {"enum": [2**60, -(2**53), 1.5, True]}),
    ],
)
def test_integers_beyond_doubles_are_never_allowed_by_a_bound(schema: dict[str, Any], held: dict[str, Any]) -> None:
    assert without_annotations(schema) == held


@pytest.mark.parametrize("name", ["Items", "Length", "Properties"])
def test_counts_are_integers_however_they_are_written(name: str) -> None:
    assert without_annotations({f"min{name}": 2.0, f"max{name}": "3"}) == {f"min{name}": 2, f"max{name}": 3}
    odd: dict[str, Any] = {f"min{name}": 2.5, f"max{name}": "9" * 5000}
    assert without_annotations({"items": odd}) == {"items": odd}
    for wrong in (2.5, -1.0, 1e300, "x", "²", "", True):
        assert without_annotations({f"min{name}": wrong}) == {f"min{name}": wrong}
    assert check_asks(sent(guided_json={"type": "array", "minItems": 1.0, "maxItems": "2"})) == []


@pytest.mark.parametrize(
    "schema", [{"const": 2**53 + 1}, {"enum": [{"a": [2**70]}]}, {"items": {"minimum": 2**63}}, {"minimum": 1e30}]
)
def test_integers_that_cannot_be_drawn_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidAsk, match=r"double|64 bits") as raised:
        sent(guided_json=schema)
    assert raised.value.param == "guided_json"
