"""Bodies of the Messages API as conversations, and every way in which one can be wrong."""

import json
import re
from typing import Any

import msgspec
import pytest

from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.conversation import Conversation
from nodes.gateway.surfaces.messages.reading import MessagesReader
from nodes.gateway.surfaces.messages.translation import Translated, hides_thinking
from nodes.gateway.surfaces.messages.types import MessagesBody

READER = MessagesReader(MessagesBody)
ATTRIBUTION = "x-anthropic-billing-header: cc_version=2.1.154.3f1; cc_entrypoint=cli; cch=fa690;"
WEATHER = {
    "name": "weather",
    "description": "Says how it is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PLACE_FOR_CLAUDE_CODE = re.compile(
    r"messages[.[](\d+)[\].]+content[.[](\d+)[\].]+(?:tool_result[.[]content[.[](\d+)[\].]+)?(image|document|pdf)"
)
"""What its version 2.1.332 looks for, to take the block out of the conversation."""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


def call(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": fields}


def result(call_id: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    given = {} if content is None else {"content": content}
    return {"type": "tool_result", "tool_use_id": call_id, **given, **fields}


def read(*messages: Any, **fields: Any) -> Translated:
    return READER.read(json.dumps({"max_tokens": 8, "messages": messages or [user("hi")]} | fields).encode())


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    """What is asked of the answer, and the messages as a chat template gets them."""
    found = read(*messages, **fields)
    options: dict[str, Any] = msgspec.to_builtins(found.options.fields)
    given = {name: value for name, value in options.items() if value is not None}
    return given | {"messages": json.loads(found.conversation.chat)}


def refusal(*messages: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(*messages, **fields)
    return caught.value


def test_a_plain_body() -> None:
    assert chat() == {"max_tokens": 8, "messages": [user("hi")]}
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stream": True, "model": "tiny"}
    assert chat(**fields, stop_sequences=["a", "b"]) == {
        "max_tokens": 8, "messages": [user("hi")], **fields, "stop": ["a", "b"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("Be brief.", "Be brief."),
        ([said("You are a tool."), said("Be brief.")], "You are a tool.\nBe brief."),
        ([said(ATTRIBUTION), said("You are a tool."), said("Be brief.")], "You are a tool.\nBe brief."),
        (f"{ATTRIBUTION}\nBe brief.", "Be brief."),
        (f"Be brief.\n{ATTRIBUTION}", "Be brief.\n"),
        (f"Not a line: {ATTRIBUTION}", f"Not a line: {ATTRIBUTION}"),
    ],
)
def test_system(system: Any, text: str) -> None:
    assert chat(system=system)["messages"] == [{"role": "system", "content": text}, user("hi")]


def test_system_of_nothing_but_attribution_is_none() -> None:
    assert chat(system=[said(ATTRIBUTION)])["messages"] == [user("hi")]
    assert chat(system="")["messages"] == [user("hi")]


def test_system_within_a_conversation_stays_where_it_is() -> None:
    turns = [user("hi"), assistant(said("hello")), user("and?"), {"role": "system", "content": [said("9 left")]}]
    assert chat(*turns)["messages"] == [
        user("hi"), {"role": "assistant", "content": "hello"}, user("and?"), {"role": "system", "content": "9 left"}
    ]  # fmt: skip
    first = {"role": "system", "content": f"{ATTRIBUTION}\nBe brief."}
    assert chat(first, user("hi"))["messages"] == [{"role": "system", "content": "Be brief."}, user("hi")]


def test_calls_and_results() -> None:
    turns = [
        user([said("Compare"), said("two cities.")]),
        assistant(
            {"type": "thinking", "thinking": "Two calls.", "signature": "s"},
            {"type": "redacted_thinking", "data": "Eo8B"},
            said("I look. "),
            call("t1", city="Rom", days=[1, {"a": None}]),
            said("Then."),
            call("t2", city="Oslo"),
        ),
        user([
            said("Go on."),
            result("t2", [said("rain"), {"type": "tool_reference", "tool_name": "weather"}]),
            result("t1", "no such city", is_error=True),
        ]),
    ]  # fmt: skip
    assert chat(*turns)["messages"] == [
        user("Compare\ntwo cities."),
        {
            "role": "assistant",
            "content": "I look. Then.",
            "reasoning_content": "Two calls.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
                for arguments in ['{"city":"Rom","days":[1, {"a": null}]}']
            ]
            + [{"id": "t2", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}],
        },
        {"role": "tool", "tool_call_id": "t2", "name": "weather", "content": "rain\nweather"},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "Error: no such city"},
        user("Go on."),
    ]


def test_a_result_says_once_that_it_is_an_error() -> None:
    for content, shown in ((None, "Error: "), ("Error: no", "Error: no"), ([said("late")], "Error: late")):
        turns = [user("hi"), assistant(call("t1")), user([result("t1", content, is_error=True)])]
        assert chat(*turns)["messages"][-1]["content"] == shown
    assert chat(user("hi"), assistant(call("t1")), user([result("t1")]))["messages"][-1]["content"] == ""


def test_turns_of_one_role_in_a_row_are_one() -> None:
    assert chat(user("a"), user([said("b")]))["messages"] == [user("a\nb")]
    turns = [user("a"), assistant({"type": "thinking", "thinking": "hm"}), assistant(said("b")), assistant(call("t1"))]
    [_, one, *_] = chat(*turns, user([result("t1", "x")]))["messages"]
    assert (one["content"], one["reasoning_content"], len(one["tool_calls"])) == ("b", "hm", 1)
    split = [user("a"), assistant(call("t1"), call("t2")), user([result("t1", "x")]), user([result("t2", "y")])]
    assert [one["role"] for one in chat(*split)["messages"]] == ["user", "assistant", "tool", "tool"]


def test_documents_and_search_results_are_text() -> None:
    document = {
        "type": "document", "title": "T", "context": "C", "source": {"type": "text", "media_type": "x", "data": "D"},
    }  # fmt: skip
    blocks = {"type": "document", "source": {"type": "content", "content": [said("one"), said("two")]}}
    found = {"type": "search_result", "title": "S", "source": "https://a.b", "content": [said("three")]}
    assert chat(user([document, blocks, found]))["messages"] == [user("T\nC\nD\none\ntwo\nS\nhttps://a.b\nthree")]


def test_an_answer_is_continued() -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat(user("hi"), assistant(said("The answer")))["messages"][-1]["content"] == "The answer"
    assert fields.items() <= chat(user("hi"), assistant(said("The answer"))).items()
    for nothing in (assistant(), assistant(said(""))):
        assert chat(user("hi"), nothing) == {"max_tokens": 8, "messages": [user("hi")]}


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([user("hi"), user([result("t1", "x")])], "messages.1.content.0.tool_use_id"),
        ([user([said("a"), result("t1", "x")])], "messages.0.content.1.tool_use_id"),
        ([user("a"), assistant(call("t1")), user([result("t1"), result("t1")])], "messages.2.content.1.tool_use_id"),
        ([user("a"), assistant(call("t1"))], "messages.1"),
        ([user("a"), assistant(call("t1")), user("b")], "messages.1"),
        ([user("a"), assistant(call("t1"), call("t2")), user([result("t2"), said("b")])], "messages.1"),
        ([user("a"), assistant(call("t1")), assistant(said("b"))], "messages.1"),
        ([user("a"), assistant(call("t1"), call("t1"))], "messages.1.content.1.id"),
        ([assistant(said("a")), user("b")], "messages.0.role"),
        ([{"role": "system", "content": "a"}], "messages"),
        ([user("")], "messages.0"),
        ([user([])], "messages.0"),
        ([user("a"), assistant(result("t1"))], "messages.1.content.0.type"),
        ([user([call("t1")])], "messages.0.content.0.type"),
        ([user([{"type": "thinking", "thinking": "a"}])], "messages.0.content.0.type"),
        ([{"role": "system", "content": [result("t1")]}], "messages.0.content.0.type"),
        ([user([{"type": "image", "source": {"type": "url", "url": "x"}}])], "messages.0.content.0.type"),
        ([user("a"), assistant(call("t1")), user([result("t1", [{"type": "image"}])])],
         "messages.2.content.0.content.0.type"),
        ([user([{"type": "document", "source": {"type": "base64"}}])], "messages.0.content.0.source.type"),
        ([{"role": "tool", "content": "a"}], "messages.0.role"),
        ([user("a"), assistant({**call("t1"), "input": "{}"})], "messages.1.content.0.input"),
    ],
)  # fmt: skip
def test_conversations_that_are_refused(turns: Any, param: str) -> None:
    assert refusal(*turns).param == param


def test_parts_that_can_only_be_text_say_so() -> None:
    assert refusal(system=[{"text": "a"}]).param == "system.0.type"
    found = {"type": "search_result", "title": "a", "source": "b", "content": [{"text": "c"}]}
    assert refusal(user([found])).param == "messages.0.content.0.content.0.type"
    document = {"type": "document", "source": {"type": "content", "content": [{"text": "c"}]}}
    assert refusal(user([document])).param == "messages.0.content.0.source.content.0.type"


def test_ten_thousand_blocks() -> None:
    calls = [call(f"t{number}") for number in range(5000)]
    results = [result(f"t{number}", str(number)) for number in range(5000)]
    messages = chat(user([said("x")] * 10_000), assistant(*calls), user(results))["messages"]
    assert [len(messages), messages[-1]["content"]] == [5002, "4999"]
    assert refusal(*[user("a"), assistant(call("t1")), user([result("t1")])] * 2).param == "messages.4.content.0.id"


def test_tools() -> None:
    found = read(
        tools=[
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {**WEATHER, "cache_control": {"type": "ephemeral"}, "input_examples": [{}]},
            {"type": "custom", "name": "exact", "input_schema": {"type": "object"}, "strict": True},
        ]
    )
    use = found.conversation.tools
    assert json.loads(use.rendered) == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Says how it is.",
                "parameters": WEATHER["input_schema"],
            },
        },
        {"type": "function", "function": {"name": "exact", "parameters": {"type": "object"}}},
    ]
    assert [(tool.name, tool.strict, tool.param) for tool in use.offered] == [
        ("weather", False, "tools.1.input_schema"), ("exact", True, "tools.2.input_schema"),
    ]  # fmt: skip
    assert found.options.unknown_fields == ["tools.type:web_search_20250305"]
    assert refusal(tools=[WEATHER, WEATHER]).param == "tools.1.name"


def loaded_late(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "input_schema": {"type": "object"}, "defer_loading": True} for name in names]


def shown_names(asked: Conversation) -> list[str]:
    """Of the tools that the chat template gets."""
    return [tool["function"]["name"] for tool in json.loads(asked.tools.rendered)]


def test_tools_that_are_loaded_late_are_shown_where_a_result_refers_to_them() -> None:
    reference = {"type": "tool_reference", "tool_name": "time"}
    unknown = {"type": "tool_reference", "tool_name": "other"}
    turns = [user("x"), assistant(call("t1")), user([result("t1", [reference, unknown])])]
    asked = read(*turns, tools=[*loaded_late("time", "date"), WEATHER]).conversation
    shown = '{"type":"function","function":{"name":"time","parameters":{"type":"object"}}}'
    assert asked.turns[-1].content == f"time can be called from here on: {shown}\nother"
    assert [tool.name for tool in asked.tools.offered] == ["time", "date", "weather"]
    assert shown_names(asked) == ["weather"]
    demanded = read(*turns, tools=[*loaded_late("time", "date"), WEATHER], tool_choice={"type": "tool", "name": "date"})
    assert shown_names(demanded.conversation) == ["date", "weather"]


@pytest.mark.parametrize(
    "tools",
    [
        loaded_late("time", "date"),
        [WEATHER, *loaded_late("time"), {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}],
    ],
    ids=["no other tool", "the server is to search"],
)
def test_tools_that_nothing_would_load_are_shown_at_once(tools: Any) -> None:
    turns = [user("x"), assistant(call("t1")), user([result("t1", [{"type": "tool_reference", "tool_name": "time"}])])]
    asked = read(*turns, tools=tools).conversation
    assert asked.turns[-1].content == "time"
    assert shown_names(asked) == [tool["name"] for tool in tools if "input_schema" in tool]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"name": "a"}], "tools.0.input_schema"),
        ([{"type": "bash_20250124", "name": "bash"}], "tools.0.type"),
        ([{"name": "", "input_schema": {}}], "tools.0.name"),
        ([{"name": "a", "input_schema": []}], "tools.0.input_schema"),
    ],
)
def test_tools_that_are_refused(tools: Any, param: str) -> None:
    assert refusal(tools=tools).param == param


@pytest.mark.parametrize(
    ("choice", "mode", "one_call", "names"),
    [
        (None, "auto", False, ["weather", "time"]),
        ({"type": "auto"}, "auto", False, ["weather", "time"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", True, ["weather", "time"]),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", False, ["weather", "time"]),
        ({"type": "none"}, "auto", False, []),
        ({"type": "tool", "name": "weather"}, "named", True, ["weather"]),
    ],
)
def test_tool_choice(choice: Any, mode: str, one_call: bool, names: list[str]) -> None:
    use = read(tools=[WEATHER, {"name": "time", "input_schema": {}}], tool_choice=choice).conversation.tools
    assert (use.mode, use.one_call, [tool.name for tool in use.offered]) == (mode, one_call, names)
    assert bool(use.rendered) is bool(names)


def test_the_choice_of_a_tool_that_is_not_there() -> None:
    assert refusal(tools=[WEATHER], tool_choice={"type": "tool", "name": "time"}).param == "tool_choice.name"
    assert refusal(tool_choice={"type": "tool", "name": "time"}).param == "tool_choice.name"


@pytest.mark.parametrize(
    ("thinking", "thinks", "hides"),
    [
        ({"type": "enabled", "budget_tokens": 4096}, True, False),
        ({"type": "enabled", "budget_tokens": 4096, "display": "omitted"}, True, True),
        ({"type": "disabled"}, False, False),
        ({"type": "adaptive"}, None, False),
        ({"type": "adaptive", "display": "omitted"}, None, True),
        ({"type": "adaptive", "display": "updates"}, None, False),
        ({"type": "between_tools"}, None, False),
        (None, None, False),
    ],
)
def test_thinking(thinking: Any, thinks: bool | None, hides: bool) -> None:
    assert chat(thinking=thinking).get("enable_thinking") is thinks
    assert hides_thinking(read(thinking=thinking).body) is hides


def test_the_form_of_the_answer() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], "strict": True}}
    assert chat(output_config={"format": form, "effort": "max"}).items() >= {
        "response_format": expected, "reasoning_effort": "high"
    }.items()  # fmt: skip
    assert chat(output_format=form)["response_format"] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_format": {"schema": {}}}, "output_format.type"),
    ],
)
def test_fields_that_are_refused(fields: Any, param: str) -> None:
    assert refusal(**fields).param == param


def test_what_has_no_effect_is_accepted() -> None:
    accepted = {
        "metadata": {"user_id": "u"}, "betas": ["x"], "service_tier": "auto", "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "container": None,
        "mcp_servers": [],
    }  # fmt: skip
    assert read(**accepted, whim=1).options.unknown_fields == ["whim"]
    assert chat(**accepted) == chat()
    assert refusal(mcp_servers=[{"type": "url"}]).param == "mcp_servers"
    assert refusal(container="c").param == "container"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}


@pytest.mark.parametrize(
    ("turns", "param", "place"),
    [
        ([user([said("x"), IMAGE])], "messages.0.content.1.type", "messages.0.content.1.image"),
        ([user([PDF])], "messages.0.content.0.source.type", "messages.0.content.0.document.source.base64"),
        (
            [user("x"), assistant(call("t1")), user([result("t1", [said("a"), IMAGE])])],
            "messages.2.content.0.content.1.type",
            "messages.2.content.0.tool_result.content.1.image",
        ),
        (
            [user("x"), assistant(call("t1")), user([result("t1", [PDF])])],
            "messages.2.content.0.content.0.source.type",
            "messages.2.content.0.tool_result.content.0.document.source.base64",
        ),
        (
            [user("x"), {"role": "system", "content": [{"type": "tool_addition", "tool": {}}]}],
            "messages.1.content.0.type",
            "messages.1.content.0.tool_addition",
        ),
    ],
)
def test_a_block_that_is_not_text_is_said_to_be_unsupported(turns: Any, param: str, place: str) -> None:
    error = refusal(*turns)
    assert error.param == param
    assert f"Input tag '{place.rpartition('.')[2]}' of {place} is not supported" in error.message


def test_where_an_image_is_can_be_read_by_claude_code() -> None:
    in_a_result = [user("x"), assistant(call("t1")), user([result("t1", [said("a"), IMAGE])])]
    for turns, found in (
        (in_a_result, ("2", "0", "1", "image")),
        ([user("x"), assistant(call("t1")), user([result("t1", [PDF])])], ("2", "0", "0", "document")),
        ([user([said("x"), IMAGE])], ("0", "1", None, "image")),
    ):
        place = PLACE_FOR_CLAUDE_CODE.search(refusal(*turns).message)
        assert place is not None
        assert place.groups() == found
