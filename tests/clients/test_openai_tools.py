"""Tools and reasoning as the `openai` Python package reads them, from a ring that repeats its prompt."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from pydantic import BaseModel

from nodes.protocol import TemplateIs
from tests.nodes.gateway.fake_ring import CONFIG, ServedRing

pytestmark = pytest.mark.clients

TEMPLATE = "</think> json object with function name and arguments within <tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")
]


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SAID = "<think>\nWhere?\n</think>\n\nLet me see.\n" + call("weather", city="Rome") + "\n" + call("time", city='a "b"')


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with ServedRing(msgspec.structs.replace(CONFIG, context_length=2000)) as ring:
        ring.tokenizer.template = TemplateIs(template=TEMPLATE, shows_tools=True)
        with openai.OpenAI(base_url=ring.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
            yield client


def asked(text: str = SAID, **fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [{"role": "user", "content": text}], "tools": TOOLS, **fields}


def test_whole(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**asked()).choices[0]
    assert choice.finish_reason == "tool_calls"
    said: Any = choice.message
    assert (said.content, said.reasoning, said.reasoning_content) == ("\n\nLet me see.\n", "\nWhere?\n", "\nWhere?\n")
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in said.tool_calls]
    assert calls == [("weather", {"city": "Rome"}), ("time", {"city": 'a "b"'})]
    assert len({one.id for one in said.tool_calls}) == 2


@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}, {"stop": ["Let"]}])
def test_streamed_is_whole(client: openai.OpenAI, fields: Any) -> None:
    whole = client.chat.completions.create(**asked(**fields)).choices[0]
    with client.chat.completions.stream(**asked(**fields)) as stream:
        events = list(stream)
        joined = stream.get_final_completion().choices[0]
    assert joined.finish_reason == whole.finish_reason
    assert joined.message.content == (whole.message.content or "")
    assert joined.message.model_extra == whole.message.model_extra
    for one, other in zip(joined.message.tool_calls or [], whole.message.tool_calls or [], strict=True):
        assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    kinds = {event.type for event in events}
    assert ("tool_calls.function.arguments.delta" in kinds) == bool(whole.message.tool_calls)


def test_an_answer_cut_in_a_call_is_text(client: openai.OpenAI) -> None:
    text = "Hm. " + call("weather", city="Rome")
    whole = client.chat.completions.create(**asked(text, max_tokens=50)).choices[0]
    assert (whole.finish_reason, whole.message.tool_calls, whole.message.content) == ("length", None, text[:50])


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**asked(call("weather", city="Rome")))
    said = first.choices[0].message
    assert said.tool_calls is not None
    messages = [
        {"role": "user", "content": ""},
        said.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(**asked() | {"messages": messages}).choices[0]
    assert (answer.message.tool_calls, answer.finish_reason) == (None, "stop")
    messages[-1]["tool_call_id"] = "call_of_another"
    with pytest.raises(openai.BadRequestError, match=r"messages\.2\.tool_call_id"):
        client.chat.completions.create(**asked() | {"messages": messages})


def test_the_strict_parser(client: openai.OpenAI) -> None:
    class Weather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(Weather, name="weather")
    answer = client.chat.completions.parse(**asked(call("weather", city="Rome")) | {"tools": [tool]})
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Weather(city="Rome")


def test_functions_of_before(client: openai.OpenAI) -> None:
    body = asked(call("weather", city="Rome")) | {"functions": [TOOLS[0]["function"]]}
    del body["tools"]
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "function_call"
    assert whole.message.function_call is not None
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    deltas = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert deltas[0].name == "weather" == whole.message.function_call.name
    assert "".join(delta.arguments or "" for delta in deltas) == whole.message.function_call.arguments
    assert chunks[-1].finish_reason == "function_call"


def test_logprobs_and_ids_of_all_tokens_come_with_what_is_shown(client: openai.OpenAI) -> None:
    fields = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole: Any = client.chat.completions.create(**asked(**fields)).choices[0]
    chunks: list[Any] = [one.choices[0] for one in client.chat.completions.create(**asked(**fields), stream=True)]
    assert [token_id for one in chunks for token_id in getattr(one, "token_ids", None) or []] == whole.token_ids
    names = [token.token for one in chunks if one.logprobs for token in one.logprobs.content]
    assert names == [token.token for token in whole.logprobs.content]
    assert "".join(names) == SAID


def test_which_stop_matched(client: openai.OpenAI) -> None:
    for stream in (False, True):
        answer: Any = client.chat.completions.create(**asked("Well, no.", stop=[", ", "!"]), stream=stream)
        choice = list(answer)[-1].choices[0] if stream else answer.choices[0]
        assert (choice.finish_reason, choice.stop_reason, choice.matched_stop) == ("stop", ", ", ", ")
        answer = client.chat.completions.create(**asked("Well", stop=["!"]), stream=stream)
        choice = list(answer)[-1].choices[0] if stream else answer.choices[0]
        assert (choice.finish_reason, choice.stop_reason, choice.matched_stop) == ("stop", None, 256)
