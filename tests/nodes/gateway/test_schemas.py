"""What is served, `/openapi.json` allows, and what is refused by name, it names."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError
from nodes.gateway.fields.unsupported import NEUTRAL_VALUES
from nodes.gateway.jobs.fan_out import max_tokens_of
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.routes.openapi import document
from nodes.gateway.surfaces.messages.surface import MESSAGES
from nodes.gateway.surfaces.messages.types import REFUSED
from nodes.gateway.surfaces.responses.surface import RESPONSES

CONFIG = GatewayConfig(
    model_name="m", aliases=("n",), context_length=100, vocab_size=300, max_samples_per_call=8, max_prompts_per_call=3
)
VALIDATOR = Validator(CONFIG)
DOCUMENT = json.loads(document("1", CONFIG))
SCHEMAS = DOCUMENT["components"]["schemas"]
READERS: dict[str, Any] = {
    "ChatCompletionBody": lambda data: VALIDATOR.chat(data, "c"),
    "CompletionBody": lambda data: VALIDATOR.text(data, "c"),
    "ResponsesBody": lambda data: RESPONSES.read(VALIDATOR, data, "r"),
    "TokenizeBody": lambda data: VALIDATOR.tokenize(data, "c"),
    "DetokenizeBody": VALIDATOR.detokenize,
    "MessagesBody": lambda data: MESSAGES.read(VALIDATOR, data, "m"),
    "CountTokensBody": lambda data: MESSAGES.counted(VALIDATOR, data, "m"),
}
TYPES = {
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list,
    "object": dict,
}  # fmt: skip
COMMENTS = frozenset({"title", "description", "default", "discriminator"})


def is_a(value: Any, name: str) -> bool:
    """JSON's types; a number written as 1.0 is none of the integers that this server reads."""
    return isinstance(value, TYPES[name]) and not (isinstance(value, bool) and name in ("integer", "number"))


def same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def allows(schema: dict[str, Any], value: Any) -> bool:
    """JSON Schema, as much of it as the document uses; any other keyword is an error."""
    return all(holds(key, rule, schema, value) for key, rule in schema.items() if key not in COMMENTS)


def holds(key: str, rule: Any, schema: dict[str, Any], value: Any) -> bool:
    match key:
        case "$ref":
            return allows(SCHEMAS[rule.rpartition("/")[2]], value)
        case "type":
            return any(is_a(value, name) for name in ([rule] if isinstance(rule, str) else rule))
        case "enum":
            return any(same(value, one) for one in rule)
        case "const":
            return same(value, rule)
        case "anyOf":
            return any(allows(one, value) for one in rule)
        case "allOf":
            return all(allows(one, value) for one in rule)
        case "not":
            return not allows(rule, value)
        case "minimum" | "maximum" | "exclusiveMaximum":
            at_least, at_most = {"minimum": (rule, value), "maximum": (value, rule)}.get(key, (0, 0))
            return not is_a(value, "number") or (at_least <= at_most if key[0] == "m" else value < rule)
        case "minLength" | "maxLength" | "pattern":
            if not isinstance(value, str):
                return True
            if key == "pattern":
                return re.search(rule.replace("$", r"\Z"), value) is not None
            return len(value) >= rule if key == "minLength" else len(value) <= rule
        case "items" | "minItems" | "maxItems":
            if not isinstance(value, list):
                return True
            if key == "items":
                return all(allows(rule, one) for one in value)
            return len(value) >= rule if key == "minItems" else len(value) <= rule
        case _:
            return holds_of_object(key, rule, schema, value)


def holds_of_object(key: str, rule: Any, schema: dict[str, Any], value: Any) -> bool:
    if not isinstance(value, dict):
        assert key in ("properties", "required", "propertyNames", "additionalProperties", "maxProperties"), key
        return True
    match key:
        case "properties":
            return all(allows(rule[name], one) for name, one in value.items() if name in rule)
        case "required":
            return all(name in value for name in rule)
        case "propertyNames":
            return all(allows(rule, name) for name in value)
        case "additionalProperties":
            return all(allows(rule, one) for name, one in value.items() if name not in schema.get("properties", {}))
        case "maxProperties":
            return len(value) <= rule
    raise AssertionError(f"{key} is not known here")


NUMBERS = st.sampled_from(
    [-2, -1, 0, 1, 2, 7, 98, 99, 100, 128, 129, 299, 300, 2**31 - 1, 2**31, 2**63, 0.5, 2.5, 1e-9]
)
STRINGS = st.sampled_from(["", "a", "m", "n", "user", "text", "refusal", "x" * 257, "x" * 65, "07", "299", "300"])
SCALARS = st.none() | st.booleans() | NUMBERS | STRINGS
LISTS = st.lists(SCALARS, max_size=4) | st.lists(st.lists(NUMBERS, max_size=2), max_size=4)
VALUES = SCALARS | LISTS | st.dictionaries(STRINGS, SCALARS, max_size=2)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": STRINGS | LISTS,
    "logprobs": st.none() | st.booleans() | st.sampled_from([-1, 0, 20, 21]),
    "top_logprobs": st.sampled_from([None, -1, 0, 1, 20, 21]),
    "logprob_token_ids": st.lists(st.sampled_from([-1, 0, 299, 300]), max_size=2),
    "logit_bias": st.dictionaries(STRINGS, st.sampled_from([0, 1, 100, -100, 101]), max_size=3),
    "stream_options": st.dictionaries(
        st.sampled_from(["include_usage", "include_obfuscation", "x"]), st.booleans() | st.none()
    ),
    "content": STRINGS | LISTS | st.lists(
        st.fixed_dictionaries({}, optional={
            "type": st.sampled_from(["text", "input_text", "refusal", "image_url"]),
            "text": SCALARS, "refusal": SCALARS,
        }), max_size=2),
    "tool_calls": st.none() | LISTS,
    "function_call": st.none() | st.just({}) | SCALARS,
    "refusal": st.none() | STRINGS,
    "reasoning": SCALARS, "thinking": st.none() | STRINGS,
    "role": STRINGS,
    "tokens": LISTS,
    "response_format": VALUES | st.sampled_from([
        {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": 1}}, {"type": "yaml"},
    ]),
    "structured_outputs": VALUES | st.sampled_from([{"regex": "a"}, {"json": {}}, {"choice": []}, {"choice": ["a"]}]),
    "guided_choice": LISTS | st.just(["a"]),
}  # fmt: skip
OF_RESPONSES: dict[str, st.SearchStrategy[Any]] = {}
ITEM: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "web_search_call", None]),
    "call_id": STRINGS, "name": STRINGS, "arguments": STRINGS, "output": FIELDS["content"], "role": STRINGS,
    "content": FIELDS["content"],
}  # fmt: skip
OF_RESPONSES["input"] = VALUES | st.lists(st.fixed_dictionaries({}, optional=ITEM), max_size=2)
OF_RESPONSES["tools"] = VALUES | st.lists(
    st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["function", "custom", "web_search", "namespace"]), "name": STRINGS,
    }), max_size=2)  # fmt: skip
OF_RESPONSES["text"] = VALUES | st.fixed_dictionaries({
    "format": VALUES | st.sampled_from([{"type": "text"}, {"type": "json_schema"}, {"type": "json_object"}]),
})  # fmt: skip
OF_RESPONSES["tool_choice"] = VALUES | st.fixed_dictionaries({}, optional={
    "type": st.sampled_from(["function", "custom", "web_search", "allowed_tools"]), "name": STRINGS,
    "tools": st.lists(st.fixed_dictionaries({"type": st.sampled_from(["function", "x"])}, optional={"name": STRINGS})),
})  # fmt: skip
OF_RESPONSES["include"] = VALUES | st.lists(st.sampled_from(["reasoning.encrypted_content", "x"]), max_size=2)
BLOCKS: Any = [
    {"type": "text", "text": "a"}, {"type": "text"}, {"type": "thinking", "thinking": "a"}, {"type": "image"},
    {"type": "tool_use", "id": "t", "name": "a", "input": {}}, {"type": "tool_result", "tool_use_id": "t"},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "a"}]},
]  # fmt: skip
FIELDS["tools"] = VALUES | st.sampled_from([
    [{"name": "a", "input_schema": {}}], [{"name": "a"}], [{"name": "a", "type": "custom"}],
    [{"name": "", "type": "x"}],
])  # fmt: skip
FIELDS["tool_choice"] = VALUES | st.sampled_from([{"type": "auto"}, {"type": "none"}, {"type": "x"}])
FIELDS["thinking"] = VALUES | st.sampled_from(
    [{"type": "enabled", "budget_tokens": 1}, {"type": "enabled"}, {"type": "adaptive", "display": "omitted"}]
)
FIELDS["system"] = VALUES | st.lists(st.sampled_from(BLOCKS), max_size=2)
FIELDS["stop_sequences"] = LISTS | st.just(["a"])
FIELDS["messages"] = (
    VALUES
    | st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "system", "tool"]),
                "content": STRINGS | st.lists(st.sampled_from(BLOCKS), max_size=3),
            }
        ),
        max_size=3,
    )
    | st.lists(
        st.fixed_dictionaries(
            {"role": STRINGS},
            optional={
                name: FIELDS[name]
                for name in ("content", "tool_calls", "function_call", "refusal", "reasoning", "thinking")
            },
        ),
        max_size=2,
    )
)
NEEDED: dict[str, Any] = {
    "ChatCompletionBody": {"messages": [{"role": "user", "content": "a"}]},
    "CompletionBody": {"prompt": "a"},
    "ResponsesBody": {"input": "a"},
    "TokenizeBody": {},
    "DetokenizeBody": {"tokens": [1]},
    "MessagesBody": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "CountTokensBody": {"messages": [{"role": "user", "content": "a"}]},
}


def bodies(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """What is needed, most often, and a few fields with values at the limits and beyond."""
    fields = st.sampled_from(sorted(SCHEMAS[name]["properties"]))
    chosen = st.lists(fields, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries(
            {
                one: st.sampled_from([None, *NEUTRAL_VALUES.get(one, ())]) | FIELDS.get(one, VALUES) | SCALARS
                for one in names
            }
        )
    )
    return st.builds(lambda needed, body: {**needed, **body}, st.sampled_from([NEEDED[name], NEEDED[name], {}]), chosen)


def refusal_of(name: str, body: dict[str, Any]) -> ApiError | None:
    """Why it is not served, with the shortest of prompts."""
    try:
        job = READERS[name](json.dumps(body).encode())
        if isinstance(job, Job):
            max_tokens_of(job, 1, CONFIG)
    except ApiError as error:
        return error
    return None


BODIES = {name: bodies(name) for name in READERS}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=400)
@given(data=st.data())
def test_what_is_served_is_allowed(name: str, data: st.DataObject) -> None:
    agree(name, data.draw(BODIES[name]))


@pytest.mark.parametrize("field", OF_RESPONSES)
@settings(max_examples=150)
@given(data=st.data())
def test_what_is_served_of_a_field_of_responses_is_allowed(field: str, data: st.DataObject) -> None:
    agree("ResponsesBody", {**NEEDED["ResponsesBody"], field: data.draw(OF_RESPONSES[field])})


def agree(name: str, body: dict[str, Any]) -> None:
    if refusal_of(name, body) is None:
        assert allows({"$ref": f"#/{name}"}, body)


@pytest.mark.parametrize("name", ["ChatCompletionBody", "CompletionBody", "MessagesBody"])
def test_fields_that_are_refused_are_named(name: str) -> None:
    refused = REFUSED if name == "MessagesBody" else NEUTRAL_VALUES
    named = {field for field in refused if SCHEMAS[name]["properties"][field].get("description")}
    # Others are served here: a chat has `top_logprobs`, a completion `echo`.
    assert len(refused) - len(named) <= 1
    for field in named:
        body = {**NEEDED[name], field: "of no use"}
        assert not allows({"$ref": f"#/{name}"}, body)
        refusal = refusal_of(name, body)
        assert refusal is not None
        assert refusal.param == field


@pytest.mark.parametrize("name", READERS)
def test_examples_are_allowed_and_so_is_an_unknown_field(name: str) -> None:
    (body,) = (
        operation["post"]["requestBody"]["content"]["application/json"]
        for operation in DOCUMENT["paths"].values()
        if "requestBody" in operation.get("post", {})
        and operation["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/" + name)
    )
    assert allows(body["schema"], {**body["example"], "of_next_year": 1})
    READERS[name](json.dumps({**body["example"], "of_next_year": 1}).encode())
