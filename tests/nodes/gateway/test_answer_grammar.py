"""Whatever is drawn under the grammar of a form of calls is read by its parser as valid calls."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from mesh.actor import Answer
from mesh.address import Address
from nodes.asks import InvalidAsk, check_asks
from nodes.asks.grammar import Grammar
from nodes.asks.grammar_text import grammar_of, limits
from nodes.gateway.answer_form import AnswerForm, form_of
from nodes.gateway.answers import Answers, Joined
from nodes.gateway.config import GatewayConfig
from nodes.gateway.constraints import after_reasoning, with_calls
from nodes.gateway.errors import ApiError
from nodes.gateway.parsers import CALLS, ParserNames, marks_of
from nodes.gateway.validation import Job, Validator
from nodes.protocol import TemplateIs
from tests.nodes.asks.grammars import SPEC
from tests.nodes.asks.grammars import tokenizer as tiny_tokenizer

FORMS = (*CALLS, "mistral named")
MARKS = sorted({mark for name in CALLS for mark in marks_of(ParserNames(name))} | {"<think>", "</think>"})
TAILS = {"openai": "<|start|>assistant"}
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
ROME, NOTE = ("weather", {"city": "Rome"}), ("note.add", {"kind": "a", "tags": []})
VALIDATOR = Validator(GatewayConfig(model_name="m", context_length=1000))


@cache
def tokenizer(*, has_tokens: bool) -> tuple[Any, LLTokenizer]:
    """The bundled model's, with all marks as tokens of their own or as letters like others."""
    document = json.loads(tiny_tokenizer().to_str())
    # It has two marks of its own.
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in MARKS]
    made = type(tiny_tokenizer()).from_str(json.dumps(document))
    if has_tokens:
        made.add_special_tokens(MARKS)
    return made, LLTokenizer(made.to_str(), n_vocab=made.get_vocab_size(), eos_token=list(SPEC.eos_token_ids))


def form(name: str, reasoning: str = "none", *, has_tokens: bool = False) -> AnswerForm:
    calls, _, named = name.partition(" ")
    config = GatewayConfig(model_name="m", context_length=9, tool_call_parser=calls, reasoning_parser=reasoning)
    made, _ = tokenizer(has_tokens=has_tokens)
    ids = {mark: token_id for mark in MARKS if (token_id := made.token_to_id(mark)) is not None}
    said = TemplateIs(template="[ARGS]" if named else "", added_ids=ids, shows_tools=True)
    return form_of(Answer(said, (), Address("tok", 1)), config)


def chat(tools: Any = TOOLS, **fields: Any) -> Job:
    tools = [{"type": "function", "function": tool} for tool in tools]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    return VALIDATOR.chat(json.dumps(body).encode(), "chatcmpl-1")


def drawn(job: Job, of: AnswerForm, seed: int, tail: str, *, ends: tuple[str, ...] = ()) -> tuple[str, bool]:
    """Text of random tokens of those allowed, mostly of `ends` where one may come; and whether it came to an end."""
    made, read = tokenizer(has_tokens=len(of.mark_ids) == len(marks_of(of.names)))
    grammar = next(ask for ask in after_reasoning(job, of, tail).asks if isinstance(ask, Grammar))
    check_asks(job.prepare.checks)
    text = grammar_of(grammar.kind, grammar.text, lambda _: False, after=grammar.after)
    matcher, dice, output = LLMatcher(read, text, limits=limits(), log_level=0), random.Random(seed), []
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(2000):
        mask = matcher.compute_bitmask()
        among = [one for one in range(8 * len(mask)) if mask[one >> 3] >> (one & 7) & 1]
        assert among, matcher.get_error()
        pieces = {one: made.decode([one], skip_special_tokens=False) for one in among}
        wanted = [one for one in among if pieces[one].startswith(ends)] if ends and dice.random() < 0.7 else []
        token_id = dice.choice(wanted or among)
        if token_id in SPEC.eos_token_ids:
            return made.decode(output, skip_special_tokens=False), True
        output.append(token_id)
        assert matcher.consume_token(token_id)
    return made.decode(output, skip_special_tokens=False), False


def read(text: str, job: Job, of: AnswerForm, tail: str) -> Joined:
    return Answers(of, job.answer, tail, ["r-0"]).joined(0, text)


def check_calls(answer: Joined, tools: Any = TOOLS) -> list[str]:
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    for _, call in answer.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return [call.name for _, call in answer.calls]


def accepts(text: str, job: Job, of: AnswerForm, tail: str = "") -> bool:
    """Whether an answer may be this text."""
    made, at_llguidance = tokenizer(has_tokens=len(of.mark_ids) == len(marks_of(of.names)))
    grammar = next(ask for ask in after_reasoning(job, of, tail).asks if isinstance(ask, Grammar))
    document = grammar_of(grammar.kind, grammar.text, lambda _: False, after=grammar.after)
    matcher, ids = LLMatcher(at_llguidance, document, limits=limits()), made.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(of: AnswerForm, *calls: tuple[str, Any]) -> str:
    """Calls as the form says."""
    form = of.call_form
    assert form is not None

    def said(name: str, arguments: Any) -> str:
        if not form.as_lines:
            return form.head.replace("NAME", name) + json.dumps(arguments) + form.tail
        values = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
        lines = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in values.items())
        return form.head.replace("NAME", name) + lines + form.tail

    return form.opening + form.between.join(said(*call) for call in calls) + form.closing


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_required_calls_are_valid(name: str, has_tokens: bool) -> None:
    of, tail = form(name, has_tokens=has_tokens), TAILS.get(name, "")
    job = with_calls(chat(tool_choice="required"), of)
    for seed in range(8):
        text, is_over = drawn(job, of, seed, tail, ends=("]", "}"))
        assert is_over, text
        answer = read(text, job, of, tail)
        assert check_calls(answer)
        assert not answer.text.strip(), text
    several = written(of, ROME, NOTE, ROME)
    assert accepts(several, job, of) == (name != "openai")
    assert name == "openai" or check_calls(read(several, job, of, tail)) == ["weather", "note.add", "weather"]


@pytest.mark.parametrize("name", FORMS)
def test_a_named_call_is_that_one(name: str) -> None:
    of, tail = form(name), TAILS.get(name, "")
    job = with_calls(chat(tool_choice={"type": "function", "function": {"name": "note.add"}}), of)
    for seed in range(3):
        text, is_over = drawn(job, of, seed, tail)
        assert is_over
        assert check_calls(read(text, job, of, tail)) == ["note.add"], text


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
         "no value of the required parameter 'a' has its type"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}},
         "'pattern' of a text cannot be enforced"),
    ],
)  # fmt: skip
def test_what_no_grammar_describes(name: str, parameters: Any, why: str) -> None:
    job = chat([{"name": "f", "parameters": parameters, "strict": True}])
    with pytest.raises(ApiError, match=f"of 'f' cannot be kept to .*: .*{why}") as caught:
        with_calls(job, form(name))
    assert (caught.value.status, caught.value.param) == (400, "tools.0.function.parameters")
    plain = chat([{"name": "f", "parameters": parameters}])
    assert with_calls(plain, form(name)) == plain, "it is no matter where nothing is enforced"


def test_a_property_without_a_value_is_left_out() -> None:
    properties = {"a": {"type": "boolean", "enum": ["x"]}, "b": {"type": "integer", "enum": [1, "x"]}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    for name in ("hermes", "qwen3_coder"):
        job = with_calls(chat([tool], tool_choice="required"), form(name))
        check_asks(job.prepare.checks)
        assert [accepts(written(form(name), ("f", {"b": one})), job, form(name)) for one in (1, 2)] == [True, False]


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
