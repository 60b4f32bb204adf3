"""Tools and reasoning as the `anthropic` Python package reads them, from a ring that repeats its prompt."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from nodes.protocol import TemplateIs
from tests.nodes.gateway.fake_ring import CONFIG, ServedRing
from tests.nodes.gateway.messages.anthropic_events import events_of, message_of, whole_message

pytestmark = pytest.mark.clients

TEMPLATE = "</think> json object with function name and arguments within <tool_call>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "time")]


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SAID = "<think>\nWhere?\n</think>\n\nLet me see.\n" + call("weather", city="Rome") + "\n" + call("time", city='a "b"')


@pytest.fixture(scope="module")
def ring() -> Iterator[ServedRing]:
    with ServedRing(msgspec.structs.replace(CONFIG, context_length=2000)) as ring:
        ring.tokenizer.template = TemplateIs(template=TEMPLATE, shows_tools=True)
        yield ring


@pytest.fixture
def client(ring: ServedRing) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=ring.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def asked(text: str = SAID, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "bytes", "max_tokens": 1000, "messages": messages, "tools": TOOLS, **fields}


def test_whole(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked())
    thought, text, *calls = message.content
    assert (thought.type, thought.thinking) == ("thinking", "\nWhere?\n")
    assert thought.signature
    assert text.text == "\n\nLet me see.\n"
    assert [(one.name, one.input) for one in calls] == [("weather", {"city": "Rome"}), ("time", {"city": 'a "b"'})]
    assert len({one.id for one in calls}) == 2
    assert all(one.id.startswith("toolu_") for one in calls)
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"stop_sequences": ["Let"]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}},
        {"max_tokens": 60},
        {"tool_choice": {"type": "none"}},
    ],
)
def test_streamed_is_whole(ring: ServedRing, fields: Any) -> None:
    whole = whole_message(httpx.post(ring.url + "/v1/messages", json=asked(**fields), verify=False).content)
    stream = httpx.post(ring.url + "/v1/messages", json=asked(**fields, stream=True), verify=False).content
    joined = message_of(events_of(stream))
    assert without_ids(joined) == without_ids(whole)
    assert joined["usage"]["output_tokens"] > 20


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"id": "", "content": [block | {"id": ""} for block in message["content"]]}


def test_a_call_that_is_cut_is_text(client: anthropic.Anthropic) -> None:
    text = "Hm. " + call("weather", city="Rome")
    whole = client.messages.create(**asked(text, max_tokens=50))
    assert [(block.type, block.text) for block in whole.content] == [("text", "Hm. "), ("text", text[4:50])]
    assert whole.stop_reason == "max_tokens"


def test_a_conversation_with_a_tool(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**asked("<think>Hm.</think>" + call("weather", city="Rome")))
    *_, used = first.content
    result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    more: Any = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**asked() | {"messages": more})
    assert (answer.content[0].text, answer.stop_reason) == ("How is it?sunny", "end_turn")
    result["tool_use_id"] = "toolu_of_another"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.2\.content\.0\.tool_use_id"):
        client.messages.create(**asked() | {"messages": more})


def test_a_tool_that_is_loaded_late_is_called_and_not_shown_at_the_beginning(
    ring: ServedRing, client: anthropic.Anthropic
) -> None:
    tools = [TOOLS[0], TOOLS[1] | {"defer_loading": True}]
    answer = client.messages.create(**asked(call("time", city="Rome"), tools=tools))
    assert [(one.name, one.input) for one in answer.content] == [("time", {"city": "Rome"})]
    shown = json.loads(ring.seen.prepares[-1].tools or b"")
    assert [tool["function"]["name"] for tool in shown] == ["weather"]
    client.messages.create(**asked(tools=tools, tool_choice={"type": "none"}))
    assert ring.seen.prepares[-1].tools is None


def test_a_tool_s_error_names_it(client: anthropic.Anthropic) -> None:
    bad: Any = [*TOOLS, {"name": "odd", "strict": True, "input_schema": {"type": "array"}}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.2"):
        client.messages.create(**asked() | {"tools": bad})
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.name"):
        client.messages.create(**asked(tool_choice={"type": "tool", "name": "none of them"}))
