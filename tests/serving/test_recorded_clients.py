"""What Codex 0.171.0, opencode 1.18.33 and Open WebUI 0.12.4 sent, to a whole mesh: it is served, as they read it.

`recorded/` has a body in each file, whole but for long texts and most of the tools. The toy calls no tool of theirs by
itself, so where a call is wanted it is asked for, and of tools with arguments for certain ones.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from nodes.gateway.fields.body_reader import BodyReader
from nodes.gateway.fields.openai_types import CHAT_BODY
from nodes.gateway.surfaces.responses.translation import read, translate
from tests.nodes.gateway.messages.anthropic_events import events_of as messages_events_of
from tests.nodes.gateway.messages.anthropic_events import message_of
from tests.nodes.gateway.surfaces.openai_events import events_of
from tests.serving.conftest import APART, MeshOf, RunningMesh

pytestmark = [pytest.mark.process, pytest.mark.clients]

RECORDED = Path(__file__).parent / "recorded"
NAMES = sorted(path.relative_to(RECORDED).with_suffix("").as_posix() for path in RECORDED.glob("*/*.json"))
RESULT = "one two"
NUM_SEEDS = 20
"""The toy may write on and on; of so many texts one has an end."""


class Call(NamedTuple):
    """A call as the client reads it."""

    id: str
    name: str
    arguments: str
    namespace: str | None = None


class Answer(NamedTuple):
    """What a client makes of a stream: `own` is the model's turn, as it goes back."""

    text: str
    calls: list[Call]
    is_whole: bool
    own: list[dict[str, Any]]


class Surface(NamedTuple):
    """One API: how answers are limited and read there, and how a call is demanded and answered."""

    path: str
    limit: str
    answer: Callable[[bytes], Answer]
    demand: Callable[[dict[str, Any]], Any]
    result: Callable[[Call, dict[str, Any]], dict[str, Any]]
    turns: str


def response_answer(data: bytes) -> Answer:
    """As Codex: items when they are done, and only if the response is `completed` are they all there."""
    events = events_of(data)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    ended = events[-1]
    assert ended["type"] in ("response.completed", "response.incomplete")
    assert ended["response"]["output"] == items
    texts, calls = [], []
    for item in items:
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        elif item["type"] == "function_call":
            calls.append(Call(item["call_id"], item["name"], item["arguments"], item.get("namespace")))
        elif item["type"] == "custom_tool_call":
            calls.append(Call(item["call_id"], item["name"], item["input"]))
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == "".join(texts)
    return Answer(deltas, calls, ended["type"] == "response.completed", items)


def chat_answer(data: bytes) -> Answer:
    """As npm's `@ai-sdk/openai-compatible`: a call's first piece has its id and name, the last chunk the usage."""
    *chunks, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    text, calls, reasons = "", dict[int, Call](), list[str]()
    read_chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    for choice in (choice for chunk in read_chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        assert delta.get("role") in (None, "assistant")
        text += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            function = piece["function"]
            if piece["index"] not in calls:
                assert (piece["type"], type(piece["id"]), type(function["name"])) == ("function", str, str)
                calls[piece["index"]] = Call(piece["id"], function["name"], "")
            call = calls[piece["index"]]
            calls[piece["index"]] = call._replace(arguments=call.arguments + (function.get("arguments") or ""))
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    usage = read_chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    sent = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls.values()
    ]
    own = {"role": "assistant", "content": text} | ({"tool_calls": sent} if sent else {})
    return Answer(text, list(calls.values()), reasons != ["length"], [own])


def message_answer(data: bytes) -> Answer:
    message = message_of(messages_events_of(data))
    blocks = message["content"]
    calls = [Call(one["id"], one["name"], json.dumps(one["input"])) for one in blocks if one["type"] == "tool_use"]
    text = "".join(one["text"] for one in blocks if one["type"] == "text")
    return Answer(text, calls, message["stop_reason"] != "max_tokens", [{"role": "assistant", "content": blocks}])


def response_result(call: Call, tool: dict[str, Any]) -> dict[str, Any]:
    kind = {"function": "function_call_output", "custom": "custom_tool_call_output"}[tool["type"]]
    return {"type": kind, "call_id": call.id, "output": RESULT}


def message_result(call: Call, tool: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}


RESPONSES = Surface(
    "/v1/responses", "max_output_tokens", response_answer,
    lambda tool: {key: tool[key] for key in ("type", "name", "namespace") if key in tool}, response_result, "input",
)  # fmt: skip
CHATS = Surface(
    "/v1/chat/completions", "max_tokens", chat_answer,
    lambda tool: {"type": "function", "function": {"name": tool["function"]["name"]}},
    lambda call, tool: {"role": "tool", "tool_call_id": call.id, "content": RESULT}, "messages",
)  # fmt: skip
MESSAGES = Surface(
    "/v1/messages", "max_tokens", message_answer, lambda tool: {"type": "tool", "name": tool["name"]},
    message_result, "messages",
)  # fmt: skip


def surface_of(name: str) -> Surface:
    client, _, what = name.partition("/")
    if client == "codex" or what.startswith("responses"):
        return RESPONSES
    return MESSAGES if what.startswith("messages") else CHATS


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.fixture
def mesh(mesh_of: MeshOf) -> RunningMesh:
    return mesh_of(*APART)


def ask(mesh: RunningMesh, surface: Surface, body: dict[str, Any], limit: int, **fields: Any) -> Answer:
    answer = httpx.post(mesh.url + surface.path, json={**body, surface.limit: limit, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return surface.answer(answer.content)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_is_answered(mesh: RunningMesh, name: str) -> None:
    found = ask(mesh, surface_of(name), recorded(name), 24, temperature=0)
    assert found.text or found.calls


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that the client runs; of a namespace each with its name."""
    found: list[dict[str, Any]] = []
    for tool in body["tools"]:
        inner = tool.get("tools")
        found += [tool] if inner is None else [one | {"namespace": tool["name"]} for one in inner]
    return [tool for tool in found if tool.get("type") != "web_search"]


def with_certain_arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool, or each of the namespace, with all that it requires said already."""
    if "tools" in tool:
        return {**tool, "tools": [with_certain_arguments(one) for one in tool["tools"]]}
    if "function" in tool:
        return {**tool, "function": with_certain_arguments(tool["function"])}
    key = "input_schema" if "input_schema" in tool else "parameters"
    if key not in tool:
        return tool
    said: dict[str, Any] = {"string": "hello.txt", "number": 7, "array": ["a"]}
    schema = tool[key]
    certain = {name: {"const": said[schema["properties"][name]["type"]]} for name in schema["required"]}
    return {**tool, key: {**schema, "properties": certain, "additionalProperties": False}}


RESULTS = ("opencode/responses_results", "opencode/messages_results", "open_webui/chat_results")
CALLED = [
    (name, number)
    for name in ("codex/turn", "opencode/chat", *RESULTS)
    for number in range(len(tools_of(recorded(name))))
]


@pytest.mark.parametrize(("name", "number"), CALLED)
def test_a_tool_is_called_and_its_result_taken(mesh: RunningMesh, name: str, number: int) -> None:
    surface, body = surface_of(name), recorded(name)
    tool = tools_of(body)[number]
    certain = [with_certain_arguments(one) for one in body["tools"]]
    asked = {**body, "tools": certain, "tool_choice": surface.demand(tool)}
    answers = (ask(mesh, surface, asked, 120, seed=seed) for seed in range(NUM_SEEDS))
    found = next(answer for answer in answers if answer.is_whole)
    (call,) = found.calls
    assert (call.name, call.namespace) == (tool.get("function", tool)["name"], tool.get("namespace"))
    if tool.get("type") != "custom":
        assert set(json.loads(call.arguments)) == set(required_of(tool))
    turns = [*body[surface.turns], *found.own, surface.result(call, tool)]
    ask(mesh, surface, {**body, surface.turns: turns}, 8, temperature=0)


def required_of(tool: dict[str, Any]) -> list[str]:
    function = tool.get("function", tool)
    return (function.get("parameters") or function["input_schema"])["required"]


def test_an_answer_of_codex_s_output_schema(mesh: RunningMesh) -> None:
    body = recorded("codex/output_schema")
    answers = (ask(mesh, RESPONSES, body, 60, tool_choice="none", seed=seed) for seed in range(NUM_SEEDS))
    found = next(answer for answer in answers if answer.is_whole)
    assert isinstance(json.loads(found.text)["answer"], int)


def test_what_codex_sends_back_reaches_the_model() -> None:
    turns = json.loads(translate(read(json.dumps(recorded("codex/reasoning")).encode())).conversation.chat)
    roles = [message["role"] for message in turns]
    assert roles == ["developer", "user", "user", "assistant", "tool", "tool", "assistant", "tool"]
    *_, looked, _, _, wrote, written = turns
    assert (looked["reasoning_content"], looked["content"]) == ("\nRead it first.\n", "\n\nLet me see.\n")
    assert [json.loads(one["function"]["arguments"])["cmd"] for one in looked["tool_calls"]] == ["cat hello.txt", "ls"]
    (patch,) = wrote["tool_calls"]
    assert json.loads(patch["function"]["arguments"])["input"].startswith("*** Begin Patch\n*** Add File: new.txt\n")
    assert wrote["reasoning_content"] == "\nNow write.\n"
    assert written["tool_call_id"] == patch["id"]


@pytest.mark.parametrize("name", [name for name in NAMES if surface_of(name) is not MESSAGES])
def test_no_field_is_unknown(name: str) -> None:
    data = json.dumps(recorded(name)).encode()
    found = read(data) if surface_of(name) is RESPONSES else BodyReader(CHAT_BODY).decode(data)
    assert found.unknown_fields == []
