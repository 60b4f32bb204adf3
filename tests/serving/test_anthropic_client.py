"""The `anthropic` client against real meshes: a model that calls tools, prefilled apart; and long loops."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.serving.conftest import APART, MeshOf, RunningMesh

# Of bytes, so that loops are long in tokens; what it says does not matter to them.
ECHO = (
    "--model", "echo", "--mixed", "1", "--context-length", "32768",
    "--chat-template", str(Path(__file__).parent / "templates" / "calling.jinja"),
)  # fmt: skip

NOTE = {
    "name": "note",
    "description": "Writes something down.",
    "input_schema": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 100, "maxLength": 200}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
MESSAGES: Any = [{"role": "user", "content": "What is 12 + 7?"}]
GREEDY: Any = {"model": "tiny", "max_tokens": 600, "extra_body": {"temperature": 0}}

pytestmark = [pytest.mark.process, pytest.mark.clients]


@pytest.fixture
def mesh(mesh_of: MeshOf) -> RunningMesh:
    return mesh_of(*APART)


def client_of(mesh: RunningMesh) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=mesh.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[anthropic.Anthropic]:
    with client_of(mesh) as client:
        yield client


def said(message: Any) -> Any:
    """What does not differ between two answers to one question."""
    content = [block.model_dump(exclude_none=True) | {"id": ""} for block in message.content]
    return content, message.stop_reason, message.stop_sequence, message.usage.output_tokens


def test_an_answer_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=MESSAGES, system="You are a helpful assistant.", **GREEDY)
    assert whole.content[0].text == "19"
    with client.messages.stream(messages=MESSAGES, system="You are a helpful assistant.", **GREEDY) as stream:
        assert said(stream.get_final_message()) == said(whole)
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES, system="You are a helpful assistant.")
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_an_agent_s_loop(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    fields: Any = {"tools": [{"name": "weather", "input_schema": schema}], **GREEDY}
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    first = client.messages.create(messages=messages, **fields)
    [call] = first.content
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **fields) as stream:
        answer = stream.get_final_message()
    assert ([block.text for block in answer.content], answer.stop_reason) == (["Weather in Rome: sunny"], "end_turn")
    assert answer.usage.cache_read_input_tokens


def test_a_call_by_a_grammar(client: anthropic.Anthropic) -> None:
    fields: Any = {"tools": [NOTE], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, **GREEDY}
    whole = client.messages.create(messages=MESSAGES, **fields)
    assert whole.stop_reason == "tool_use"
    [call] = whole.content
    assert call.name == "note"
    assert 100 <= len(call.input["text"]) <= 200
    with client.messages.stream(messages=MESSAGES, **fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        assert said(stream.get_final_message()) == said(whole)
    assert json.loads("".join(pieces)) == call.input
    assert len(pieces) > 5, "arguments come as they are made"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "written"}]}
    more: Any = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model="tiny", messages=more, tools=[NOTE])
    answer = client.messages.create(messages=more, tools=[NOTE], **GREEDY)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.1.*without a result"):
        client.messages.create(messages=more[:2], **GREEDY)


def test_a_worker_s_death_changes_no_event(mesh: RunningMesh, client: anthropic.Anthropic) -> None:
    fields: Any = {"tools": [NOTE], "tool_choice": {"type": "tool", "name": "note"}, "messages": MESSAGES, **GREEDY}
    undisturbed = client.messages.create(**fields)
    # The last one decodes.
    victims = [actor["pid"] for actor in mesh.ps() if actor["role"] == "worker"][-1:]
    kinds: list[str] = []
    num_killed = 0
    with client.messages.stream(**fields) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "input_json" and len(event.partial_json) and kinds.count("input_json") == 5:
                os.kill(victims.pop(), signal.SIGKILL)
                num_killed += 1
        disturbed = stream.get_final_message()
    assert num_killed == 1
    assert said(disturbed) == said(undisturbed)
    assert [kind for kind in kinds if kind not in ("input_json", "content_block_delta")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize("attributed", [True, False])
def test_twenty_turns_with_tools_are_read_from_the_cache(mesh_of: MeshOf, attributed: bool) -> None:
    system = [
        {"type": "text", "text": f"You are {attributed}. " + "Do what you are asked, and say what you did. " * 150}
    ]
    messages: Any = [{"role": "user", "content": "Write down all numbers."}]
    shares: list[float] = []
    with client_of(mesh_of(*ECHO)) as client:
        for turn in range(20):
            line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.154.1; cch={turn:05x};"}
            answer = client.messages.create(
                model="echo", max_tokens=4, messages=messages, tools=[NOTE], system=[line] * attributed + system
            )
            usage = answer.usage
            cached = usage.cache_read_input_tokens or 0
            shares.append(cached / (usage.input_tokens + cached))
            call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "note", "input": {"text": f"number {turn}"}}
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": "written"}
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": "I write."}, call]},
                {"role": "user", "content": [result]},
                {"role": "system", "content": f"<total_tokens>{1000 - turn} tokens left</total_tokens>"},
            ]
    assert min(shares[1:]) >= 0.9, shares


def test_ten_thousand_blocks(mesh_of: MeshOf) -> None:
    blocks: Any = [{"type": "text", "text": "x"}] * 10_000
    with client_of(mesh_of(*ECHO)) as client:
        counted = client.messages.count_tokens(model="echo", messages=[{"role": "user", "content": blocks}])
        assert 20_000 < counted.input_tokens < 21_000
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model="echo", max_tokens=4, messages=[{"role": "user", "content": blocks * 2}])
