"""What Claude Code and aider send, as they sent it, to a real mesh; answers are read as strictly as they read them.

Recorded from Claude Code 2.1.332 and aider 0.86.2: `claude -p` with its own tools, with two of an MCP server, and with
`/context`; `claude` in a terminal; `aider --message` in several modes. Every field is kept; long texts are cut, most
tools left out, and names of directories and ids replaced. What the model said in Claude Code's conversation was put
there, but for that with the tools of the MCP server, whose names are as `tiny` knows them: Claude Code has
`mcp__SERVER__` before them.
"""

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.nodes.gateway.messages.anthropic_events import events_of, message_of
from tests.serving.conftest import APART, MeshOf, RunningMesh

pytestmark = [pytest.mark.process, pytest.mark.clients]

RECORDED = Path(__file__).parent / "recorded"
PAGE = 16
"""Tokens that are cached together; a last page that is not full is not."""
PROMPT_TOO_LONG = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
REMOVED = re.compile(
    r"messages[.[](\d+)[\].]+content[.[](\d+)[\].]+(?:tool_result[.[]content[.[](\d+)[\].]+)?(image|document|pdf)"
)
"""By these two Claude Code knows what it has to shorten, and which block to take out."""

Recorded = Mapping[str, Any]


def recorded(client: str) -> dict[str, Recorded]:
    requests = json.loads((RECORDED / f"{client}.json").read_text())
    return {request["name"]: request for request in requests}


CLAUDE_CODE = recorded("claude_code")
AIDER = recorded("aider")
IN_A_ROW = [
    "first", "results", "tools found", "a file written", "a result that is an error", "an error of a tool",
    "a tool that was found", "an agent started",
]  # fmt: skip
"""One conversation's first eight requests."""
OTHERS = ["subagent", "subagent, no such tool", "the agent ended", "a tool announced late", "a title", "in a terminal"]


@pytest.fixture
def mesh(mesh_of: MeshOf) -> RunningMesh:
    return mesh_of(*APART)


def send(mesh: RunningMesh, request: Recorded, **fields: Any) -> httpx.Response:
    body = request["body"] | fields
    return httpx.post(mesh.url + request["path"], json=body, headers=request["headers"], timeout=60, verify=False)


def answer_of(mesh: RunningMesh, request: Recorded, **fields: Any) -> dict[str, Any]:
    """The message that a stream's events make; each event is of a declared type and in its place."""
    response = send(mesh, request, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.content)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    message = message_of(events)
    assert events[0].message.usage.input_tokens == prompt_tokens(message)
    return message


def prompt_tokens(message: dict[str, Any]) -> int:
    return message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]


def counted(mesh: RunningMesh, request: Recorded) -> int:
    fields = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
    body = {name: request["body"][name] for name in fields if name in request["body"]}
    response = httpx.post(f"{mesh.url}/v1/messages/count_tokens?beta=true", json=body, timeout=60, verify=False)
    assert response.status_code == 200, response.text
    return response.json()["input_tokens"]


@pytest.mark.parametrize("name", [*IN_A_ROW, *OTHERS])
def test_claude_code_is_answered(mesh: RunningMesh, name: str) -> None:
    message = answer_of(mesh, CLAUDE_CODE[name], max_tokens=8)
    assert message["model"] == "tiny"
    assert message["stop_reason"] in ("max_tokens", "end_turn")
    assert prompt_tokens(message) == counted(mesh, CLAUDE_CODE[name])


def test_claude_code_s_conversation_is_read_from_the_cache(mesh: RunningMesh) -> None:
    # Other tests have sent these requests, too: with another beginning nothing of the first is cached.
    anew = [{"type": "text", "text": "This is another conversation."}, *CLAUDE_CODE["first"]["body"]["system"]]
    messages = [answer_of(mesh, CLAUDE_CODE[name], max_tokens=1, system=anew) for name in IN_A_ROW]
    assert messages[0]["usage"]["cache_read_input_tokens"] < 2 * PAGE
    for before, message in pairwise(messages):
        # Not of the last tokens, which begin the answer: here the conversation goes on with what it was said to be.
        assert message["usage"]["cache_read_input_tokens"] > prompt_tokens(before) - 2 * PAGE


def test_claude_code_calls_tools_and_is_answered_from_their_results(mesh: RunningMesh) -> None:
    asked = answer_of(mesh, CLAUDE_CODE["tools of tiny"], temperature=0)
    calls = [(block["name"], block["input"]) for block in asked["content"]]
    assert calls == [("weather", {"city": "Rome"}), ("time", {"city": "Paris"})]
    assert asked["stop_reason"] == "tool_use"
    told = answer_of(mesh, CLAUDE_CODE["results of tiny"], temperature=0)
    said = [{"type": "text", "text": "Weather in Rome: 21 degrees and sunny\nTime in Paris: 12:30"}]
    assert (told["content"], told["stop_reason"]) == (said, "end_turn")
    assert told["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("name", "block"),
    [("image in a result", ("3", "0", "0", "image")), ("document in a result", ("7", "0", "1", "document"))],
)
def test_claude_code_is_told_what_to_take_out(mesh: RunningMesh, name: str, block: tuple[str, ...]) -> None:
    response = send(mesh, CLAUDE_CODE[name])
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    found = REMOVED.search(error["message"])
    assert found is not None, error["message"]
    assert found.groups() == block


def test_claude_code_is_told_by_how_much_a_prompt_is_too_long(mesh: RunningMesh) -> None:
    request = CLAUDE_CODE["first"]
    long = [*request["body"]["messages"], {"role": "user", "content": "What is 12 + 7? " * 300}]
    response = send(mesh, request, messages=long)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    found = PROMPT_TOO_LONG.search(response.json()["error"]["message"])
    assert found is not None, response.text
    tokens, most = map(int, found.groups())
    assert most < 2048 < tokens
    assert tokens == counted(mesh, {"body": request["body"] | {"messages": long}})


@pytest.mark.parametrize("name", ["count of a text", "count of tools"])
def test_claude_code_counts(mesh: RunningMesh, name: str) -> None:
    response = send(mesh, CLAUDE_CODE[name])
    assert response.status_code == 200, response.text
    [(field, tokens)] = response.json().items()
    assert (field, type(tokens)) == ("input_tokens", int)
    assert tokens > 10


@pytest.mark.parametrize("name", ["whole", "ask"])
def test_aider_is_answered(mesh: RunningMesh, name: str) -> None:
    response = send(mesh, AIDER[name], max_tokens=16)
    assert response.status_code == 200, response.text
    *events, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True) for event in events]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("name", ["not streamed", "commit message"])
def test_aider_is_answered_without_a_stream(mesh: RunningMesh, name: str) -> None:
    response = send(mesh, AIDER[name], max_tokens=16)
    assert response.status_code == 200, response.text
    answer = ChatCompletion.model_validate_json(response.content, strict=True)
    assert answer.choices[0].message.content
    assert answer.usage is not None


def test_aider_is_told_that_a_prompt_is_too_long(mesh: RunningMesh) -> None:
    messages = AIDER["diff"]["body"]["messages"]
    long = [{**messages[0], "content": messages[0]["content"] * 30}, *messages[1:]]
    response = send(mesh, AIDER["diff"], messages=long)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    # By these words litellm knows it, and aider says what to leave out.
    assert "maximum context length is 2048 tokens" in error["message"]
