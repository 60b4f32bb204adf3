"""Tools in bodies of chats: what they mean, and what is refused, naming the place."""

import json
from typing import Any

import pytest

from nodes.gateway.asked.answer_form import AnswerForm
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError
from nodes.gateway.fields.tool_fields import MAX_TOOL_BYTES, NO_TOOLS
from nodes.gateway.fields.tool_types import MAX_TOOLS
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.parsers import ParserNames

VALIDATOR = Validator(GatewayConfig(model_name="m", context_length=1000))
USER: Any = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **fields}}


TOOLS = [tool("one"), tool("two", strict=True), tool("three")]


def chat(*messages: Any, **fields: Any) -> Job:
    return VALIDATOR.chat(json.dumps({"messages": [USER, *messages], **fields}).encode(), "chatcmpl-1")


def refused(*messages: Any, **fields: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        chat(*messages, **fields)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert f"'{caught.value.param}'" in caught.value.message
    return caught.value.param


def choice(**given: Any) -> Any:
    return {"type": "function", "function": given}


def allowed(*names: str, mode: str = "auto") -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "mode", "names", "one_call"),
    [
        ({}, "auto", "one two three", False),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, "auto", "one two three", False),
        ({"parallel_tool_calls": False}, "auto", "one two three", True),
        ({"tool_choice": "required"}, "required", "one two three", False),
        ({"tool_choice": choice(name="two")}, "named", "two", True),
        ({"tool_choice": allowed("three", "one")}, "auto", "one three", False),
        ({"tool_choice": allowed("one", mode="required")}, "required", "one", False),
    ],
)
def test_choices(fields: Any, mode: str, names: str, one_call: bool) -> None:
    job = chat(tools=TOOLS, **fields)
    use = job.tools
    assert (use.mode, [one.name for one in use.offered], use.one_call) == (mode, names.split(), one_call)
    assert list(job.answer.tools) == names.split()
    assert use.is_narrowed == (len(names.split()) < 3 and mode != "named")
    assert job.prepare.tools is not None
    shown = json.loads(job.prepare.tools)
    assert [one["function"]["name"] for one in shown] == ["one", "two", "three"], "a cached prompt stays the same"
    assert shown[1]["function"] == {"name": "two", "parameters": PARAMETERS}, "models know nothing of `strict`"


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": None, "tool_choice": "auto"},
               {"functions": [{"name": "f"}], "function_call": "none"}],
)  # fmt: skip
def test_no_tools(fields: Any) -> None:
    job = chat(**fields)
    assert (job.tools, job.prepare.tools, job.answer.tools) == (NO_TOOLS, None, {})


def test_functions_of_old_clients() -> None:
    job = chat(functions=[{"name": "f", "description": "d"}, {"name": "g"}])
    assert (job.tools.is_legacy, job.tools.one_call, job.tools.mode) == (True, True, "auto")
    assert json.loads(job.prepare.tools or b"")[0]["function"] == {
        "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}},
    }  # fmt: skip
    named = chat(functions=[{"name": "f"}, {"name": "g"}], function_call={"name": "g"}).tools
    assert (named.mode, [one.name for one in named.offered]) == ("named", ["g"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": choice(name="four")}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": allowed("four")}, "tool_choice.allowed_tools.tools.0.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": choice(name="one")}, "tool_choice"),
        ({"tools": [tool("one"), tool("one")]}, "tools.1.function.name"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("a\n")]}, "tools.0.function.name"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tools": [tool("one", parameters="x")]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [tool(f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(f"f{n}", description="x" * (MAX_TOOL_BYTES // 64)) for n in range(65)]}, "tools"),
        ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": "f"}], "tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "g"}}, "function_call"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_refused(fields: Any, param: str) -> None:
    assert refused(**fields) == param


def called(**function: Any) -> Any:
    calls = [{"id": "c1", "type": "function", "function": {"name": "one", "arguments": "{}", **function}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answered(**fields: Any) -> Any:
    return {"role": "tool", "content": "1", "tool_call_id": "c1", **fields}


LEGACY: Any = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages",
    [
        [called(), answered()],
        [called(), USER, answered(), answered()],
        [called(arguments=""), answered()],
        [called(arguments={"n": 1}), answered()],
        # As clients keep a call that went wrong.
        [called(arguments='{"city":'), answered()],
        [LEGACY, {"role": "function", "name": "f", "content": "1"}],
    ],
)
def test_histories(messages: Any) -> None:
    assert chat(*messages)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([answered()], "messages.1.tool_call_id"),
        ([answered(), called()], "messages.1.tool_call_id"),
        ([called(), answered(tool_call_id="c2")], "messages.2.tool_call_id"),
        ([called(), answered(tool_call_id=None)], "messages.2.tool_call_id"),
        ([called(arguments=7)], "messages.1.tool_calls.0.function.arguments"),
        ([{"role": "function", "name": "f", "content": "1"}], "messages.1.name"),
        ([{"role": "function", "content": "1"}], "messages.1.name"),
    ],
)
def test_histories_that_make_no_sense(messages: Any, param: str) -> None:
    assert refused(*messages) == param


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, None),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "x": [1]}},
         {"enable_thinking": True, "thinking": False, "reasoning_effort": "low", "x": [1]}),
    ],
)  # fmt: skip
def test_what_templates_are_told_of_reasoning(fields: Any, variables: Any) -> None:
    kwargs = chat(**fields).prepare.chat_template_kwargs
    assert (kwargs and json.loads(kwargs)) == variables


def test_what_a_model_must_have_for_tools() -> None:
    use, hermes = chat(tools=TOOLS).tools, ParserNames("hermes")
    AnswerForm(hermes, shows_tools=True).check_tools(use)
    AnswerForm().check_tools(NO_TOOLS)
    for form, flag in (
        (AnswerForm(hermes), "--chat-template"),
        (AnswerForm(ParserNames(), shows_tools=True), "--tool-call-parser"),
    ):
        with pytest.raises(ApiError, match=flag) as caught:
            form.check_tools(use)
        assert (caught.value.status, caught.value.param) == (400, "tools")
