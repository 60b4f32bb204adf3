"""What the body of POST /v1/responses becomes, and what is said of a bad one."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.errors import BadRequest
from nodes.gateway.surfaces.responses.custom_input import CustomInput
from nodes.gateway.surfaces.responses.history import seal
from nodes.gateway.surfaces.responses.translation import Translated, read, translate

USER = {"role": "user", "content": "hi"}
GET = {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": True}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}
FILES = {"type": "namespace", "name": "files", "description": "F.", "tools": [{"type": "function", "name": "read"}]}
SEARCH = {"type": "web_search", "external_web_access": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"}


def translated(**body: Any) -> Translated:
    return translate(read(json.dumps(body).encode()))


def chat(**body: Any) -> dict[str, Any]:
    return json.loads(translated(**body).chat)


def test_text_is_a_message_of_the_user() -> None:
    assert chat(input="hi", instructions="Be brief.") == {
        "messages": [{"role": "system", "content": "Be brief."}, USER]
    }


@pytest.mark.parametrize("empty", ["", []])
def test_an_empty_input_can_be_answered(empty: Any) -> None:
    assert chat(input=empty, max_output_tokens=1) == {
        "messages": [{"role": "user", "content": ""}], "max_completion_tokens": 1,
    }  # fmt: skip


def test_what_agents_send() -> None:
    body = chat(
        model="m", instructions="You code.", stream=True, store=False, include=["reasoning.encrypted_content"],
        prompt_cache_key="k", parallel_tool_calls=True, tool_choice="auto", tools=[GET, SEARCH, PATCH, FILES],
        reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"},
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": seal("So: é")},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Reading."}]},
            {**CALL, "name": "read", "namespace": "files"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": '*** "Begin"'},
            {"type": "function_call_output", "call_id": "c1", "output": "one line"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        ],
    )  # fmt: skip
    assert body == {
        "model": "m", "stream": True, "parallel_tool_calls": True, "tool_choice": "auto", "reasoning_effort": "low",
        "verbosity": "low",
        "messages": [
            {"role": "system", "content": "You code.\n\nSandboxed."},
            {"role": "user", "content": "Fix it."},
            {"role": "assistant", "reasoning_content": "So: é", "content": "Reading.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "files__read", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {
                    "name": "apply_patch", "arguments": '{"input":"*** \\"Begin\\""}',
                }},
            ]},
            {"role": "tool", "tool_call_id": "c1", "name": "files__read", "content": "one line"},
            {"role": "tool", "tool_call_id": "c2", "name": "apply_patch", "content": "done"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}, "strict": True}},
            {"type": "function", "function": {
                "name": "apply_patch",
                "description": "Edits.\n\nThe value of `input` is text of this lark grammar:\nstart: x",
                "parameters": {
                    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
                    "additionalProperties": False,
                },
            }},
            {"type": "function", "function": {"name": "files__read"}},
        ],
    }  # fmt: skip


def test_several_parts_stay_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    system, user = chat(instructions="x", input=[{"role": role, "content": parts} for role in ("system", "user")])[
        "messages"
    ]
    assert system["content"] == [{"type": "text", "text": "x"}, *parts]
    assert user["content"] == parts


def test_turns_of_the_model_are_messages_each() -> None:
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]}
    output = {"type": "function_call_output", "call_id": "c1", "output": ""}
    messages = chat(input=[said, said, thought, CALL, output, thought, USER])["messages"]
    assert [
        (one["role"], one.get("content"), one.get("reasoning_content"), len(one.get("tool_calls", ())))
        for one in messages
    ] == [
        ("assistant", "a", None, 0), ("assistant", "a", None, 0), ("assistant", None, "t", 1), ("tool", "", None, 0),
        ("assistant", "", "t", 0), ("user", "hi", None, 0),
    ]  # fmt: skip


def test_reasoning_that_another_server_encrypted_is_passed_over() -> None:
    foreign = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAAABo"}
    assert chat(input=[USER, foreign])["messages"] == [USER]


def test_stored_items_come_first() -> None:
    asked = read(json.dumps({"input": [USER], "previous_response_id": "resp_1", "instructions": "x"}).encode())
    history = read(json.dumps({"input": [CALL]}).encode()).body.input
    assert isinstance(history, list)
    messages = json.loads(translate(asked, history).chat)["messages"]
    assert [one["role"] for one in messages] == ["system", "assistant", "user"]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "json_object", "schema": {}}}},
         {"response_format": {"type": "json_object", "schema": {}}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True}}},
            {"response_format": {
                "type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"a": 1}},
            }},
        ),
        ({"tool_choice": "none", "tools": [SEARCH]}, {}),
        ({"tool_choice": "required", "tools": []}, {"tool_choice": "required"}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"seed": 3, "stop": ["x"], "metadata": {"a": "b"}, "max_tool_calls": 2}, {"seed": 3, "stop": ["x"]}),
    ],
)  # fmt: skip
def test_fields(given: dict[str, Any], made: dict[str, Any]) -> None:
    body = chat(input=[USER], **given)
    del body["messages"]
    assert body == made


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ({"type": "function", "name": "get"}, "get"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "read", "namespace": "files"}, "files__read"),
    ],
)
def test_a_tool_that_is_chosen(choice: Any, made: str) -> None:
    body = chat(input=[USER], tools=[GET, PATCH, FILES], tool_choice=choice)
    assert body["tool_choice"] == {"type": "function", "function": {"name": made}}


def test_tools_that_are_allowed() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get"}, SEARCH]}
    body = chat(input=[USER], tools=[GET, PATCH, SEARCH], tool_choice=allowed)
    assert body["tool_choice"]["allowed_tools"] == {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "get"}}],
    }  # fmt: skip


def test_allowed_are_tools_of_hosts_alone() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}
    assert chat(input=[USER], tools=[GET, SEARCH], tool_choice=allowed)["tool_choice"] == "none"
    with pytest.raises(BadRequest) as caught:
        chat(input=[USER], tools=[GET, SEARCH], tool_choice={**allowed, "mode": "required"})
    assert caught.value.param == "tool_choice"


def test_tools_of_hosts_are_left_out_and_named() -> None:
    assert translated(input="x", tools=[SEARCH, {"type": "local_shell"}]).tools.hosted == ["web_search", "local_shell"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [USER, {"type": "function_call", "name": "x", "arguments": "{}"}]}, "input.1.call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input.0.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]}, "input.0.input"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c1"}]}, "input.1.output"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}, CALL]}, "input.0.call_id"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [GET, {**PATCH, "name": "get"}]}, "tools.1.name"),
        ({"tools": [{**FILES, "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.name"),
        ({"tools": [{**GET, "parameters": 3}]}, "tools.0.parameters"),
        ({"tools": [GET], "tool_choice": {"type": "function", "name": "put"}}, "tool_choice"),
        ({"tools": [GET], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"include": ["everything"]}, "include.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ],
)
def test_bad_bodies(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        translated(**{"input": "x", **body})
    assert caught.value.param == param


def test_neutral_values_are_accepted() -> None:
    translated(input="x", background=False, conversation=None, truncation="disabled", context_management=[],
               stream_options={"include_obfuscation": False}, service_tier="auto")  # fmt: skip


@pytest.mark.parametrize(
    ("of_chat", "of_client"),
    [
        ("messages.0.content.0.type", "input.0.content.0.type"),
        ("messages.1.tool_calls.0.function.name", "input.1.name"),
        ("messages.1.tool_calls.1.id", "input.2.call_id"),
        ("messages.2.content.0.type", "input.3.output.0.type"),
        ("tools.0.function.parameters.x", "tools.1.parameters.x"),
        ("tools.1.function.name", "tools.2.tools.0.name"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("messages", "input"),
        ("seed", "seed"),
    ],
)
def test_errors_name_the_fields_of_this_route(of_chat: str, of_client: str) -> None:
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    made = translated(input=[USER, CALL, custom, output], tools=[SEARCH, GET, FILES])
    assert made.name_of(of_chat) == of_client


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60)))
@settings(max_examples=80)
def test_custom_input_comes_as_it_was_written(text: str, ascii_only: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    places = sorted({0, len(arguments), *(cut for cut in cuts if cut < len(arguments))})
    custom = CustomInput()
    given_out = [custom.feed(arguments[begin:end]) for begin, end in pairwise(places)]
    assert "".join([*given_out, custom.close()]) == custom.text == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":"a', "a"), ('{"input":"a\\', "a"), ('{"input":"\\ud83d', ""), ('{"input":"\\ud83dx"}', "\ufffdx"),
        ('{"input":"\\ude00"}', "\ufffd"), ('{"x":1,"input":"a"}', "a"), ('{"patch":"a"}', '{"patch":"a"}'),
        ('{"input":3}', '{"input":3}'), ("{}", "{}"), ("", ""), ('{"inp', '{"inp'), ('{"input":"a\nb"}', "a\nb"),
        (" " * 400 + '{"input":"a"}', "a"),
    ],
)  # fmt: skip
def test_custom_input_of_any_other_form(arguments: str, text: str) -> None:
    custom = CustomInput()
    fed = "".join(custom.feed(char) for char in arguments)
    assert fed + custom.close() == custom.text == text
