"""Waves of streaming clients, and something done to the mesh when a number of events has arrived.

Raw asyncio streams on the caller's loop, so that the blow falls between two events and not some time later.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.tiny_model.agent_loop import before_calls, held_out_loops, sent_messages

NUM_CLIENTS = 16
ANSWER_TIMEOUT_S = 60.0
CLOSED = "the connection was closed"

SENTENCE = "Bob has 7 green pears. Ann has 3 red apples. The sky is blue and the grass is green. "


def bodies(salt: str, num_requests: int = 24, max_tokens: int = 128) -> list[dict[str, Any]]:
    """Half greedy, half sampled; prompts of 100 to 500 tokens, four of each beginning. `salt` keeps caches apart."""
    return [
        {
            "model": "tiny",
            "prompt": f"Story {number % 6}. " + SENTENCE * (3 + 3 * (number % 5)) + f"{number} pears",
            "seed": number,
            "temperature": float(number % 2),
            "top_p": 0.95,
            "max_tokens": max_tokens - 8 * (number % 4),
            "ignore_eos": True,
            "cache_salt": salt,
        }
        for number in range(num_requests)
    ]


LIST_OF_FRUIT = {"type": "array", "items": {"enum": ["apple", "pear", "plum"]}, "minItems": 6, "maxItems": 9}
BASKET = {
    "type": "object",
    "properties": {"who": {"enum": ["Ann", "Bob"]}, "num": {"type": "integer", "minimum": 0, "maximum": 99}}
    | {"fruit": LIST_OF_FRUIT},
    "required": ["who", "num", "fruit"],
    "additionalProperties": False,
}
"""Answers of some dozens of tokens, so that many are hit in the middle."""
ASKS: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "basket", "schema": BASKET}}},
    {"logprobs": 2, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
]
"""What requests ask of their draws, a quarter each."""
VECTORS = (3, 6)
"""Of eight requests, those that want vectors."""


def asking(salt: str, num_requests: int = 24) -> list[dict[str, Any]]:
    """`bodies` that ask for more than text, with the ids of all tokens; and, a quarter of them, for vectors."""
    return [
        _embedding(body) if number % 8 in VECTORS else body | ASKS[number // 2 % len(ASKS)] | {"return_token_ids": True}
        for number, body in enumerate(bodies(salt, num_requests))
    ]


def _embedding(body: dict[str, Any]) -> dict[str, Any]:
    """The vector of some prompts, which are prefilled in chunks, and not streamed."""
    inputs = [body["prompt"], body["prompt"] * 3, "Ann"]
    return {"model": "tiny", "input": inputs, "encoding_format": "base64", "cache_salt": body["cache_salt"]}


def calling(salt: str, num_requests: int) -> list[dict[str, Any]]:
    """Questions of an agent that has tools, as chats: what is answered are calls, several at once, or text."""
    every = [before_calls(loop) for loop in held_out_loops(7, 100)]
    return [
        {
            "model": "tiny",
            "messages": sent_messages(question),
            "tools": [tool.openai() for tool in question.tools],
            "temperature": 0.0,
            "max_tokens": 120,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        for question in every[:: 100 // num_requests][:num_requests]
    ]


@dataclass
class Answer:
    """What one client has got. `broken` is why it did not get all of it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None
    num_events: int = 0
    is_open: bool = False
    broken: str = ""

    @property
    def whole(self) -> tuple[Any, ...]:
        """What must not depend on which actors died. Cached tokens do: they are a matter of timing."""
        return self.text, self.finish_reason, self.usage, self.broken, self.token_ids, self.logprobs


async def stream(port: int, body: dict[str, Any], answer: Answer, on_event: Callable[[], None]) -> None:
    """Request `body` as a stream and gather `answer`. Raises OSError if the connection breaks.

    `on_event` is called after each choice that has arrived.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        is_vector = "input" in body
        data = json.dumps(body if is_vector else body | {"stream": True, "stream_options": {"include_usage": True}})
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        path, data = "/v1/embeddings" if is_vector else path, data.encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer.is_open = True
        status = await reader.readline()
        if not status:
            raise ConnectionResetError(CLOSED)
        if b" 200 " not in status:
            answer.broken = f"{status!r} {await reader.read(2000)!r}"
            return
        if is_vector:
            await _take_vectors(reader, answer, on_event)
            return
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                _take(json.loads(line[6:]), answer, on_event)
        raise ConnectionResetError(CLOSED)
    finally:
        writer.close()


async def _take_vectors(reader: asyncio.StreamReader, answer: Answer, on_event: Callable[[], None]) -> None:
    while (line := await reader.readline()) != b"\r\n":
        if not line:
            raise ConnectionResetError(CLOSED)
    answered = json.loads(await reader.read())
    answer.text = " ".join(one["embedding"] for one in answered["data"])
    answer.usage = answered["usage"]["prompt_tokens"], len(answered["data"])
    answer.finish_reason = "vectors"
    answer.num_events += 1
    on_event()


def _take(event: dict[str, Any], answer: Answer, on_event: Callable[[], None]) -> None:
    if "error" in event:
        answer.broken = event["error"]["message"]
        return
    if event.get("usage"):
        answer.usage = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        answer.text += choice["text"] if "text" in choice else _said(choice["delta"])
        answer.token_ids += choice.get("token_ids") or []
        if found := choice.get("logprobs"):
            parts = (found[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
            answer.logprobs += zip(*parts, strict=True)
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.num_events += 1
        on_event()


def _said(delta: dict[str, Any]) -> str:
    """Text and calls in their order; not the ids of calls, which are new for each request."""
    calls = [
        (call["function"].get("name") or "") + call["function"]["arguments"] for call in delta.get("tool_calls") or ()
    ]
    return (delta.get("content") or "") + "".join(calls)


class Wave:
    """Requests `bodies`, by `num_clients` clients at a time; `blow` is called once, when `at` events have arrived."""

    def __init__(
        self,
        port: int,
        bodies: list[dict[str, Any]],
        *,
        num_clients: int = NUM_CLIENTS,
        at: int = 0,
        blow: Callable[[], None] | None = None,
    ) -> None:
        self.answers = [Answer() for _ in bodies]
        self.num_events = 0
        self.num_hit = 0
        self._port = port
        self._bodies = bodies
        self._num_clients = num_clients
        self._at = max(1, at)
        self._blow = blow

    async def run(self) -> list[Answer]:
        todo = iter(range(len(self._bodies)))
        await asyncio.gather(*(self._client(todo) for _ in range(self._num_clients)))
        return self.answers

    async def _client(self, todo: Iterator[int]) -> None:
        for number in todo:
            answer = self.answers[number]
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await stream(self._port, self._bodies[number], answer, self._count)
            except TimeoutError:
                answer.broken = f"not ended within {ANSWER_TIMEOUT_S:.0f} s"
            except OSError as error:
                answer.broken = f"{error!r}"
            answer.is_open = False

    def _count(self) -> None:
        self.num_events += 1
        if self._blow is not None and self.num_events >= self._at:
            blow, self._blow = self._blow, None
            self.num_hit = sum(one.is_open for one in self.answers)
            blow()


def differences(got: list[Answer], wanted: list[Answer]) -> list[str]:
    """What clients could tell from their answers, in words; empty if nothing."""
    found: list[str] = []
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one.whole != other.whole:
            same = next((i for i, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), None)
            found.append(
                f"request {number}: {one.broken or 'whole'}, {one.finish_reason}, usage {one.usage} for {other.usage}, "
                f"texts of {len(one.text)} and {len(other.text)} characters differ from character {same} on, "
                f"{_first_other('token', one.token_ids, other.token_ids)}, "
                f"{_first_other('logprob', one.logprobs, other.logprobs)}"
            )
    return found


def _first_other(what: str, got: Sequence[Any], wanted: Sequence[Any]) -> str:
    for at, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return f"{what} {at} is {one}, not {other}"
    return f"{len(got)} of {len(wanted)} {what}s"
