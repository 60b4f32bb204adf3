"""Calls of tools, as the `openai` package streams them, while actors are killed in the middle: nobody can tell."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.chaos.chaos_mesh import ROLES, UNRATIONED, ChaosMesh, started
from tests.chaos.conftest import MESH

# In CI simulated clients ask for grammars while actors die, and `tests/serving/test_structured_output.py` kills a
# worker midway through such an answer; here another mesh would have to start.
pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow]

# Calls as Hermes and Qwen write them, and reasoning, which it begins only if it is told not to reason.
TEMPLATE = Path(__file__).parent.parent / "nodes" / "tokenizer" / "templates" / "qwen_like.jinja"
FRUIT = {"enum": ["apple", "pear", "plum", "cherry"]}
BASKET = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "maxLength": 12},
        "fruit": {"type": "array", "items": FRUIT, "minItems": 30, "maxItems": 40},
    },
    "required": ["who", "fruit"],
    "additionalProperties": False,
}
SCHEMAS = {"fill": BASKET, "empty": {**BASKET, "properties": {"who": {"enum": ["Ann", "Bob"]}}, "required": ["who"]}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "fill"}}]
NUM_CALLS = 8


@dataclass
class Called:
    """What one client has got: calls by index, text, reasoning, why it ended; the ids apart, since they are new."""

    calls: list[list[str]] = field(default_factory=list[list[str]])
    said: str = ""
    finish_reason: str = ""
    usage: tuple[int, int] = (0, 0)
    ids: list[str] = field(default_factory=list[str], compare=False)


@pytest.fixture(scope="module")
def mesh() -> Iterator[ChaosMesh]:
    with started(*MESH, "--chat-template", str(TEMPLATE), **UNRATIONED) as mesh:
        yield mesh


def body(number: int, salt: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{number} pears for Bob. " * (1 + number % 3 * 8)}],
        "tools": TOOLS,
        "tool_choice": CHOICES[number % 2],
        "parallel_tool_calls": number % 4 == 0,
        "seed": number,
        "temperature": float(number % 3 > 0),
        "max_tokens": 400,
        "extra_body": {"enable_thinking": False, "cache_salt": salt},
    }


async def ask(port: int, body: dict[str, Any], on_event: Callable[[], None]) -> Called:
    found = Called()
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(**body, stream=True, stream_options=options):
            if chunk.usage is not None:
                found.usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            for choice in chunk.choices:
                found.said += choice.delta.content or ""
                found.finish_reason = choice.finish_reason or found.finish_reason
                for call in choice.delta.tool_calls or ():
                    take(found, call)
                    on_event()
    return found


def take(found: Called, call: Any) -> None:
    if call.id is not None:
        assert call.index == len(found.calls), "each call begins once, in order"
        found.ids.append(call.id)
        found.calls.append([call.function.name, ""])
    assert call.index == len(found.calls) - 1
    found.calls[call.index][1] += call.function.arguments


def asked(mesh: ChaosMesh, salt: str, at: int = 0, blow: Callable[[], None] = lambda: None) -> list[Called]:
    """All at once; `blow` is called when `at` pieces of calls have arrived."""
    num_events = 0

    def on_event() -> None:
        nonlocal num_events
        num_events += 1
        if num_events == at:
            blow()

    async def all_of() -> list[Called]:
        return await asyncio.gather(*(ask(mesh.port, body(number, salt), on_event) for number in range(NUM_CALLS)))

    found = asyncio.run(all_of())
    assert num_events > at, "the blow fell after the end"
    return found


@pytest.fixture(scope="module")
def undisturbed(mesh: ChaosMesh) -> list[Called]:
    found = asked(mesh, "undisturbed")
    for number, one in enumerate(found):
        assert one.calls
        assert len(one.ids) == len(set(one.ids)) == len(one.calls)
        assert one.finish_reason in ("length", "stop" if number % 2 else "tool_calls")
        if one.finish_reason != "length":
            assert one.said == ""
            for name, arguments in one.calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert sum(one.finish_reason != "length" for one in found) > NUM_CALLS // 2
    return found


def test_whole_answers_are_what_is_streamed(mesh: ChaosMesh, undisturbed: list[Called]) -> None:
    with openai.OpenAI(base_url=f"{mesh.host.url}/v1", api_key="none", max_retries=0) as client:
        for number, one in enumerate(undisturbed):
            answer = client.chat.completions.create(**body(number, "whole"))
            message, calls = answer.choices[0].message, answer.choices[0].message.tool_calls or []
            whole = [[call.function.name, call.function.arguments] for call in calls]
            assert whole == one.calls[: len(whole)]
            assert len(whole) == len(one.calls) or one.finish_reason == "length", "what was cut is text"
            assert (message.content or "", answer.choices[0].finish_reason) == (one.said, one.finish_reason)


@pytest.mark.parametrize("role", ["decode worker", "decode scheduler", "detokenizer", "prefill worker"])
def test_killed_in_the_middle_of_calls(mesh: ChaosMesh, undisturbed: list[Called], role: str) -> None:
    before = mesh.settled()
    at = sum(len(arguments) for one in undisturbed for _, arguments in one.calls) // 12
    found = asked(mesh, role, at, lambda: mesh.strike(ROLES[role]) or None)
    assert found == undisturbed
    assert mesh.settled().epochs[ROLES[role]] == before.epochs[ROLES[role]] + 1
