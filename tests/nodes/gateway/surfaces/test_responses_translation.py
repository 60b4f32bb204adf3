"""What the body of POST /v1/responses becomes, and what is said of a bad one."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.openai_types import ChatOptions
from nodes.gateway.fields.tool_fields import NO_TOOLS
from nodes.gateway.surfaces.responses.custom_input import CustomInput
from nodes.gateway.surfaces.responses.history import seal
from nodes.gateway.surfaces.responses.translation import NAMES, Translated, read, translate

USER = {"role": "user", "content": "hi"}
GET = {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": True}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}
FILES = {"type": "namespace", "name": "files", "description": "F.", "tools": [{"type": "function", "name": "read"}]}
SEARCH = {"type": "web_search", "external_web_access": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"}


def translated(**body: Any) -> Translated:
    return translate(read(json.dumps(body).encode()))


def messages(made: Translated) -> Any:
    """As a chat template gets them."""
    return json.loads(made.conversation.chat)


def chat(**body: Any) -> dict[str, Any]:
    """What is asked of the answer, and the messages."""
    made = translated(**body)
    options: dict[str, Any] = msgspec.to_builtins(made.options.body)
    given = {name: value for name, value in options.items() if value is not None}
    return given | {"messages": messages(made)}


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
    made = translated(
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
    options: ChatOptions = made.options.body
    assert (options.model, options.stream, options.reasoning_effort, options.verbosity) == ("m", True, "low", "low")
    assert messages(made) == [
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
    ]  # fmt: skip
    use = made.conversation.tools
    assert json.loads(use.rendered) == [
        {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}},
        {"type": "function", "function": {
            "name": "apply_patch",
            "description": "Edits.\n\nThe value of `input` is text of this lark grammar:\nstart: x",
            "parameters": {
                "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
                "additionalProperties": False,
            },
        }},
        {"type": "function", "function": {"name": "files__read", "parameters": {"type": "object", "properties": {}}}},
    ]  # fmt: skip
    assert [(tool.name, tool.strict, tool.param) for tool in use.offered] == [
        ("get", True, "tools.0.parameters"), ("apply_patch", False, "tools.2.parameters"),
        ("files__read", False, "tools.3.tools.0.parameters"),
    ]  # fmt: skip
    assert (use.mode, use.one_call) == ("auto", False)


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
    turns = chat(input=[said, said, thought, CALL, output, thought, USER])["messages"]
    assert [
        (one["role"], one.get("content"), one.get("reasoning_content"), len(one.get("tool_calls", ())))
        for one in turns
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
    assert [one["role"] for one in messages(translate(asked, history))] == ["system", "assistant", "user"]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object", "schema": None}}),
        ({"text": {"format": {"type": "json_object", "schema": {}}}},
         {"response_format": {"type": "json_object", "schema": {}}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True}}},
            {"response_format": {
                "type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"a": 1}},
            }},
        ),
        ({"tool_choice": "none", "tools": [SEARCH]}, {}),
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
    ("choice", "mode", "names", "is_narrowed"),
    [
        ({"type": "function", "name": "get"}, "named", ["get"], False),
        ({"type": "custom", "name": "apply_patch"}, "named", ["apply_patch"], False),
        ({"type": "function", "name": "read", "namespace": "files"}, "named", ["files__read"], False),
        ("required", "required", ["get", "apply_patch", "files__read"], False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get"}, SEARCH]},
         "required", ["get"], True),
    ],
)  # fmt: skip
def test_tools_that_are_chosen_or_allowed(choice: Any, mode: str, names: list[str], is_narrowed: bool) -> None:
    use = translated(input=[USER], tools=[GET, PATCH, SEARCH, FILES], tool_choice=choice).conversation.tools
    assert (use.mode, [tool.name for tool in use.offered], use.is_narrowed) == (mode, names, is_narrowed)
    assert use.one_call is (mode == "named")


def test_allowed_are_tools_of_hosts_alone() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}
    assert translated(input=[USER], tools=[GET, SEARCH], tool_choice=allowed).conversation.tools == NO_TOOLS
    with pytest.raises(BadRequest) as caught:
        translated(input=[USER], tools=[GET, SEARCH], tool_choice={**allowed, "mode": "required"})
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
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{**GET, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{**FILES, "name": "f" * 128}]}, "tools.0.tools.0.name"),
        ({"tools": [{**GET, "name": f"f{n}"} for n in range(129)]}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        (
            {"input": [CALL, {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image"}]}]},
            "input.1.output.0.type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.tool_call_id"),
        ({"input": [{"role": "function", "content": "x"}]}, "input.0.name"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"text": {"verbosity": "much"}}, "text.verbosity"),
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
        ("response_format.json_schema.schema", "text.format.schema"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("messages", "input"),
        ("seed", "seed"),
    ],
)
def test_errors_name_the_fields_of_this_route(of_chat: str, of_client: str) -> None:
    error = BadRequest(f"'{of_chat}' is wrong, 'x' is not.", param=of_chat)
    error.rename(NAMES)
    assert (error.param, error.message) == (of_client, f"'{of_client}' is wrong, 'x' is not.")


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
