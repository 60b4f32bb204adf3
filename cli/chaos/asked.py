"""What a storm asks: a few bodies over and over, so that each answer is known, and how each client behaves. Pure."""

import random
from dataclasses import dataclass
from typing import Any, Final

NUM_BODIES: Final = 16
"""So many answers have to be taken twice before the first blow: two rounds of a few seconds."""
NUM_SALTS: Final = 64
"""A body comes with so many in turn: with one, all but the first prompts would lie in caches; without end, none."""
MAX_TOKENS: Final = 64
"""Of an answer: long enough for blows to hit it in the middle, at some tokens a second as well as at some hundred."""
SENTENCE: Final = "Bob has 7 green pears. Ann has 3 red apples. The sky is blue and the grass is green. "

_CANCELLED, _SLOW = 0.15, 0.15
"""Shares of the streams whose clients go away, and whose clients read slowly."""
_PAUSE_S: Final = 0.1
"""Of a slow reader between two looks: of 64 tokens in so many events it takes 6 s, longer than a role is away."""


@dataclass(frozen=True)
class Request:
    """One body and its client. `index`: which of the known answers it must get; `stream` in the body: it is streamed.

    A client goes away after `cancel_after` events, unless that is 0, and stops reading for `pause_s` after each.
    """

    body: dict[str, Any]
    index: int = 0
    cancel_after: int = 0
    pause_s: float = 0.0

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def path(self) -> str:
        if "input" in self.body:
            return "/v1/embeddings"
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


def bodies(salt: str, num_requests: int = 24, max_tokens: int = 128, model: str = "tiny") -> list[dict[str, Any]]:
    """Half greedy, half sampled; prompts of 100 to 500 tokens, four of each beginning. `salt` keeps caches apart."""
    return [body(number, salt, max_tokens, model) for number in range(num_requests)]


def body(number: int, salt: str, max_tokens: int, model: str) -> dict[str, Any]:
    """One of `bodies`."""
    return {
        "model": model,
        "prompt": f"Story {number % 6}. " + SENTENCE * (3 + 3 * (number % 5)) + f"{number} pears",
        "seed": number,
        "temperature": float(number % 2),
        "top_p": 0.95,
        "max_tokens": max_tokens - max_tokens // 16 * (number % 4),
        "ignore_eos": True,
        "cache_salt": salt,
    }


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a stream that counts its tokens."""
    return body | {"stream": True, "stream_options": {"include_usage": True}}


class Asked:
    """The requests of a storm, by number: the same for the same seed and model."""

    def __init__(self, model: str, seed: int) -> None:
        self._model = model
        self._seed = seed

    def undisturbed(self, salt: str) -> list[Request]:
        """Each body once, asked by clients that wait for all of it."""
        return [Request(self._body(index, salt), index) for index in range(NUM_BODIES)]

    def request(self, number: int) -> Request:
        index = number % NUM_BODIES
        asked = self._body(index, f"{self._seed} {number // NUM_BODIES % NUM_SALTS}")
        draw = random.Random(f"{self._seed} {number}")
        way = draw.random()
        if "stream" not in asked or way > _CANCELLED + _SLOW:
            return Request(asked, index)
        if way < _CANCELLED:
            return Request(asked, index, cancel_after=draw.randint(1, MAX_TOKENS // 2))
        return Request(asked, index, pause_s=_PAUSE_S)

    def _body(self, index: int, salt: str) -> dict[str, Any]:
        whole = body(index, salt, MAX_TOKENS, self._model) | {"return_token_ids": True}
        # Of the greedy ones and of the sampled ones a quarter each.
        return whole if index % 8 in (2, 5) else streamed(whole)
