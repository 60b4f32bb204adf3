"""Structured output at a worker: only texts of the grammar are drawn, whatever was drawn before or twice."""

import json
import re
from array import array
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nodes.asks import DrawnModel, EditFailed, RowEdits, asked, matching, open_asks, possible
from nodes.asks.bad_words import BadWords
from nodes.asks.edits import mask_of
from nodes.asks.grammar import Grammar
from nodes.asks.matching import GrammarFailed, vocabulary_of
from nodes.asks.min_tokens import MinTokens
from tests.nodes.asks.grammars import MODEL, PROMPT, SPEC, allowed, edits_of, ids_of, schema_of, sent, text_of, walk
from tests.nodes.asks.schemas import check, drawn

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ENDS = sorted(MODEL.end_token_ids)


def assert_walks_end_well(num: int) -> None:
    num_ended = 0
    found = drawn(num)
    for seed, schema in enumerate(found):
        output, has_ended = walk(sent(response_format=schema_of(schema, strict=True)), seed, 600)
        num_ended += has_ended
        if has_ended:
            check(schema, text_of(output))
    assert len(found) == num
    assert num_ended > 0.95 * num


def test_every_text_that_ends_is_one_of_the_schema() -> None:
    assert_walks_end_well(200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_text_that_ends_is_one_of_any_schema() -> None:
    assert_walks_end_well(2000)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, r"\{.*\}"),
        ({"regex": "^[a-z]{3,5}-(x|y){1,4}$"}, "[a-z]{3,5}-(x|y){1,4}"),
        ({"guided_regex": r"a{2,4}\$"}, r"aa+\$"),
        ({"guided_choice": ["yes", "no", "(a|b) \\ é"]}, r"yes|no|\(a\|b\) \\ é"),
        ({"structured_outputs": {"choice": ["x", "xyz"]}}, "x|xyz"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"ebnf": 'root ::= "a" ("b" | "c") "."'}, r"a[bc]\."),
        ({"guided_grammar": 'start: "a" X\nX: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"guided_grammar": '?start: one\n?one: "a" X\nX: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"json_schema": '{"enum": [1, "b"]}'}, r' ?(1|"b") ?'),
        ({"guided_json": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}}, "9007199254740994"),
        ({"guided_json": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}, "-?[0-9]{1,19}"),
        ({"guided_json": {"const": {"a": [1, 2]}}}, r"[^\n]*"),
    ],
)  # fmt: skip
def test_each_kind(given: dict[str, Any], pattern: str) -> None:
    for seed in range(4):
        output, has_ended = walk(sent(**given), seed, 400)
        assert not has_ended or re.fullmatch(pattern, text_of(output), re.DOTALL), text_of(output)
        assert has_ended or "{" in pattern


def test_unions_as_pydantic_writes_them() -> None:
    closed = {"type": "object", "required": ["kind"], "additionalProperties": False}
    kinds = [{**closed, "properties": {"kind": {"const": kind}}} for kind in ("cat", "dog")]
    tagged = {"oneOf": kinds, "discriminator": {"propertyName": "kind"}}
    output, has_ended = walk(sent(response_format=schema_of(tagged, strict=True)), 1)
    assert has_ended
    jsonschema.validate(json.loads(text_of(output)), tagged)


def test_whitespace_is_the_servers_decision() -> None:
    loose = schema_of({**PERSON, "x-guidance": {"whitespace_flexible": False, "item_separator": "!!", "lenient": True}})
    spaces = [token_id for token_id in range(SPEC.vocab_size) if text_of([token_id]).strip(" \n\t") == ""]
    output, has_ended = walk(sent(response_format=loose), 3, 300, lambda ids: [i for i in ids if i in spaces] or ids)
    assert has_ended
    jsonschema.validate(json.loads(text_of(output)), PERSON)
    assert "  " not in text_of(output).replace(json.loads(text_of(output))["name"], "")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"guided_choice": ["a<|im_end|>b"]}, "a<|im_end|>b"),
        ({"regex": r"<\|im_start\|>x"}, "<|im_start|>x"),
        ({"guided_json": {"const": "<|im_end|>"}}, '"<|im_end|>"'),
        ({"guided_grammar": 'start: "é<|im_end|><|im_end|>"'}, "é<|im_end|><|im_end|>"),
    ],
)
def test_names_of_special_tokens_are_spelled(given: dict[str, Any], text: str) -> None:
    output, has_ended = walk(sent(**given), 1, 60)
    assert has_ended
    assert text_of(output) == text
    assert not {*output} & {*MODEL.end_token_ids, *ids_of("<|im_start|>")}


def test_special_tokens_that_a_grammar_names_are_drawn() -> None:
    output, has_ended = walk(sent(guided_grammar='start: "a" <|im_start|> "b"'), 1, 60)
    assert has_ended
    assert output == ids_of("a<|im_start|>b")


@pytest.mark.parametrize("trigger", ["<f=", "<|im_start|>"])
def test_tags_in_free_text(trigger: str) -> None:
    tags = {"structures": [{"begin": f"{trigger}a>", "schema": {"enum": [1]}, "end": "</f>"}], "triggers": [trigger]}
    editors = open_asks(sent(response_format={"type": "structural_tag", **tags}), MODEL).editors
    free = ids_of("some text ")
    assert set(allowed(edits_of(editors, free))) >= {*ids_of("words"), *ENDS}
    whole = [*free, *ids_of(f"{trigger}a>1</f>")]
    for size in range(len(whole)):
        edits = edits_of(editors, whole[:size])
        assert edits.allows(whole[size])
        is_in_tag = size >= len(free) + len(ids_of(trigger))
        assert edits.allows(ENDS[0]) != is_in_tag
    assert edits_of(editors, [*whole, *ids_of("and so on")]).allows(ENDS[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.lists(st.integers(0, 60), max_size=10))
def test_an_editor_is_a_cache_of_a_pure_function(seed: int, positions: list[int]) -> None:
    asks = sent(response_format=schema_of(PERSON))
    output, has_ended = walk(asks, seed)
    assert has_ended
    output += [ENDS[0], ENDS[1]]
    editors = open_asks(asks, MODEL).editors
    for position in [*positions, len(output)]:
        found = edits_of(editors, output[:position])
        assert found.mask == edits_of(open_asks(asks, MODEL).editors, output[:position]).mask
        assert found.mask == edits_of(editors, output[:position]).mask
    assert allowed(edits_of(editors, output)) == ENDS


def test_another_output_at_the_same_position_is_followed() -> None:
    editors = open_asks(sent(guided_choice=["ab", "cd"]), MODEL).editors
    for first, second in ("ab", "cd", "ab"):
        assert edits_of(editors, ids_of(first)).allows(ids_of(second)[0])
        assert not edits_of(editors, ids_of(first)).allows(ids_of(first)[0])


def test_the_end_wins_over_min_tokens_and_ignore_eos() -> None:
    a, b = ids_of("a")[0], ids_of("b")[0]
    editors = open_asks(sent(regex="ab?", min_tokens=50, stop_token_ids=[b]), MODEL).editors
    assert allowed(edits_of(editors, [])) == [a]
    # Too early for either: the one is not drawn, nor the other.
    assert set(allowed(edits_of(editors, [a]))) == {*ENDS, b}
    assert allowed(edits_of(editors, [a, b])) == ENDS
    going_on = open_asks(sent(regex="ab?", ignore_eos=True), MODEL).editors
    assert allowed(edits_of(going_on, [a])) == [b]
    assert allowed(edits_of(going_on, [a, b])) == ENDS
    assert set(allowed(edits_of(open_asks(sent(regex="ab?"), MODEL).editors, [a]))) == {*ENDS, b}


def test_an_end_that_is_a_bad_word_is_not_drawn_even_where_nothing_else_is_left() -> None:
    a = ids_of("a")
    for asks in ((MinTokens(50), BadWords(token_ids=[ENDS[:1]])), (BadWords(token_ids=[ENDS[:1]]), MinTokens(50))):
        editors = open_asks(asked([*asks, Grammar("regex", "a", "regex")]), MODEL).editors
        assert allowed(edits_of(editors, a)) == ENDS[1:]
    asks = MinTokens(50), BadWords(token_ids=[[end] for end in ENDS]), Grammar("regex", "a", "regex")
    with pytest.raises(GrammarFailed, match="other fields"):
        edits_of(open_asks(asked(asks), MODEL).editors, a)


def test_other_fields_and_the_grammar_hold_together() -> None:
    a, b = ids_of("a")[0], ids_of("b")[0]
    asks = sent(regex="[ab]", allowed_token_ids=[a, 9], logit_bias={str(a): -100.0}, presence_penalty=0.5)
    edits = edits_of(open_asks(asks, MODEL).editors, [])
    assert (allowed(edits), edits.bias) == ([a], {a: -100.0})
    with pytest.raises(GrammarFailed, match="other fields"):
        edits_of(open_asks(asks, MODEL).editors, [a])
    with pytest.raises(EditFailed) as raised:
        edits_of(open_asks(sent(regex="[ab]", allowed_token_ids=[9, b + 1]), MODEL).editors, [])
    assert raised.value.code == "grammar_failed"


def test_an_output_outside_of_the_grammar_fails_and_an_earlier_position_does_not() -> None:
    editors = open_asks(sent(regex="ab"), MODEL).editors
    for _ in range(2):
        with pytest.raises(GrammarFailed, match="cannot be followed"):
            edits_of(editors, ids_of("x"))
        assert allowed(edits_of(editors, ids_of("a"))) == ids_of("b")


@pytest.mark.parametrize(
    "given", [{"regex": "(?=a)b"}, {"guided_json": {"enum": []}}, {"ebnf": "root = 1"}, {"regex": "[^\\s\\S]"},
              {"guided_grammar": "start: <|nobody|>"}]
)  # fmt: skip
def test_what_no_tokenizer_has_checked_fails_its_row(given: dict[str, Any]) -> None:
    editors = open_asks(sent(**given), MODEL).editors
    for _ in range(2):
        with pytest.raises(GrammarFailed):
            edits_of(editors, [])


def test_a_panic_fails_its_row_and_the_next_call_begins_again() -> None:
    class Panic(BaseException):
        pass

    [editor] = open_asks(sent(regex="ab"), MODEL).editors
    edits_of((editor,), [])

    class Broken:
        def compute_bitmask(self) -> bytes:
            raise Panic("index out of bounds")

    editor._matcher = Broken()
    with pytest.raises(GrammarFailed, match="Panic: index out of bounds"):
        edits_of((editor,), [])
    assert allowed(edits_of((editor,), ids_of("a"))) == ids_of("b")


def test_a_grammar_that_takes_too_long_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_MAX_WAIT_S", 0.01)
    monkeypatch.setattr(matching, "_matcher", lambda *_: __import__("time").sleep(0.3))
    with pytest.raises(GrammarFailed, match="not compiled within"):
        edits_of(open_asks(sent(regex="slow"), MODEL).editors, [])


def test_a_grammar_whose_tokens_cost_ever_more_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_MAX_EDIT_S", 0.02)
    asks, a = sent(guided_grammar='start: start start | "a" | ""'), ids_of("a")
    with pytest.raises(GrammarFailed, match="too complex"):
        edits_of(open_asks(asks, MODEL).editors, a * 600)


def test_grammars_are_compiled_once_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_MAX_COMPILED", 2)
    matching._compiled.clear()
    for text in ("one", "two", "one", "three"):
        edits_of(open_asks(sent(regex=text), MODEL).editors, [])
    assert [text for _, _, text, _ in matching._compiled] == ["one", "three"]


@pytest.mark.parametrize("size", [SPEC.vocab_size - 100, SPEC.vocab_size + 70])
def test_a_head_of_another_width_than_the_tokenizer(size: int) -> None:
    model = DrawnModel(size, (2,), replace(SPEC, vocab_size=size))
    [editor] = open_asks(sent(regex="[^x]"), model).editors
    edits = edits_of((editor,), [])
    assert edits.mask is not None
    assert len(edits.mask) == len(mask_of([], size))
    among = allowed(edits, 8 * len(edits.mask))
    assert among
    assert max(among) < min(size, SPEC.vocab_size)
    assert allowed(edits_of((editor,), ids_of("a")), size) == [2]


def test_models_that_can_and_models_that_cannot(tmp_path: Any) -> None:
    assert "grammar/2" in possible(MODEL)
    assert "grammar/2" not in possible(MODEL._replace(spec=None))
    assert "grammar/2" not in possible(MODEL._replace(end_token_ids=()))
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = replace(SPEC, path=str(tmp_path), tokenizer_path=str(tmp_path / "tokenizer.json"))
    assert "grammar/2" not in possible(MODEL._replace(spec=broken))
    assert vocabulary_of(MODEL) is vocabulary_of(MODEL._replace(spec=replace(SPEC, notes=("another object",))))


def test_the_prompt_is_no_part_of_it() -> None:
    [editor] = open_asks(sent(regex="ab"), MODEL).editors
    edits = RowEdits()
    editor.edit(array("i", [*PROMPT, *ids_of("a")]), 0, edits)
    assert edits.mask == edits_of((editor,), []).mask
