"""Waves of streaming clients, and something done to the mesh when a number of events has arrived."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from cli.bench.client import Server
from cli.chaos.answer import Answer, differences
from cli.chaos.asked import Request, bodies, streamed
from cli.chaos.clients import ask
from tools.tiny_model.agent_loop import before_calls, held_out_loops, sent_messages

__all__ = ["NUM_CLIENTS", "Answer", "Wave", "asking", "bodies", "calling", "differences", "request", "stream"]

NUM_CLIENTS = 16

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


def request(body: dict[str, Any], index: int = 0) -> Request:
    """Vectors are not streamed, all else is."""
    return Request(body if "input" in body else streamed(body), index)


async def stream(port: int, body: dict[str, Any], answer: Answer, on_event: Callable[[], None]) -> None:
    """Request `body`, and gather `answer`; `on_event` is called after each choice that has arrived."""
    await ask(Server("127.0.0.1", port), request(body), answer, on_event)


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
            await stream(self._port, self._bodies[number], self.answers[number], self._count)

    def _count(self) -> None:
        self.num_events += 1
        if self._blow is not None and self.num_events >= self._at:
            blow, self._blow = self._blow, None
            self.num_hit = sum(one.is_open for one in self.answers)
            blow()
