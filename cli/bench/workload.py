"""What a bench asks: prompts of given lengths, those of a file, or those of a trace, and when they are due. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec

Endpoint = Literal["completions", "chat"]
Spacing = Literal["poisson", "constant"]

PATHS: Final[dict[Endpoint, str]] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
FIRST_ID: Final = 10
"""Below it are the special tokens of many vocabularies."""
TRACE_BLOCK_TOKENS: Final = 512
"""So many tokens of a prompt does each of a trace line's `hash_ids` stand for."""

# In most vocabularies each is a token; what a prompt really has is what the server's usage says.
_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name"
)
_WORDS: Final = _TEXT.split()


class BadWorkload(ValueError):
    """A file of prompts or a trace that cannot be used; the text says which line, and why."""


class Workload(Protocol):
    """Bodies by number. Numbers from `num_requests` on are new ones of the same kind, for warming up.

    `due_s`: when each is due, in seconds from the start; empty if that is not for the workload to say.
    """

    @property
    def num_requests(self) -> int: ...

    @property
    def due_s(self) -> Sequence[float]: ...

    def body(self, number: int, turn: int) -> dict[str, Any]:
        """The prompt and its limit of a request. In another turn, as far as it can be, another prompt."""
        ...


@dataclass(frozen=True)
class Made:
    """Prompts of `num_prompt` tokens, of which the first `num_shared` are the same in all; no cache knows the rest."""

    num_requests: int
    num_prompt: int
    num_output: int
    num_shared: int = 0
    vocabulary: int = 250
    seed: int = 1
    endpoint: Endpoint = "completions"
    due_s: Sequence[float] = ()

    def body(self, number: int, turn: int) -> dict[str, Any]:
        shared = _tokens(f"{self.seed} shared", self.num_shared, self.vocabulary)
        own = _tokens(f"{self.seed} {turn} {number}", self.num_prompt - self.num_shared, self.vocabulary)
        return _asked(shared + own, self.endpoint) | {"max_tokens": self.num_output}


@dataclass(frozen=True)
class Given:
    """Prompts of a file, again from the first one after the last. `num_output` where a line does not say it."""

    lines: Sequence[dict[str, Any]]
    num_requests: int
    num_output: int
    due_s: Sequence[float] = ()

    def body(self, number: int, turn: int) -> dict[str, Any]:
        return {"max_tokens": self.num_output} | self.lines[number % len(self.lines)]


class TraceLine(msgspec.Struct, frozen=True):
    """A request of a trace: milliseconds from its start, tokens, and the ids of the prompt's blocks, equal where equal.

    This is the form of the traces that were published with Mooncake.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


@dataclass(frozen=True)
class Traced:
    """Requests of a trace. `speed`: how much faster they come; `scale`: what all lengths are multiplied by."""

    lines: Sequence[TraceLine]
    num_requests: int
    speed: float = 1.0
    scale: float = 1.0
    vocabulary: int = 250
    seed: int = 1
    endpoint: Endpoint = "completions"

    @property
    def due_s(self) -> Sequence[float]:
        first = self.lines[0].timestamp
        return [(line.timestamp - first) / 1000 / self.speed for line in self.lines[: self.num_requests]]

    def body(self, number: int, turn: int) -> dict[str, Any]:
        line = self.lines[number % len(self.lines)]
        num_prompt = max(1, round(line.input_length * self.scale))
        size = max(1, round(TRACE_BLOCK_TOKENS * self.scale))
        tokens: list[int] = []
        for block in line.hash_ids[: -(-num_prompt // size)]:
            tokens += _tokens(f"{self.seed} {turn} block {block}", size, self.vocabulary)
        # Without ids nothing is shared; with too few of them, the rest is not.
        left = max(0, num_prompt - len(tokens))
        tokens += _tokens(f"{self.seed} {turn} {number}", left, self.vocabulary)
        num_output = max(1, round(line.output_length * self.scale))
        return _asked(tokens[:num_prompt], self.endpoint) | {"max_tokens": num_output}


def due_times(rate: float, num_requests: int, spacing: Spacing, seed: int) -> list[float]:
    """Seconds from the start: gaps of `1 / rate`, all alike or exponential with that mean, as independent users'."""
    draw = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for _ in range(num_requests):
        now += draw.expovariate(rate) if spacing == "poisson" else 1 / rate
        times.append(now)
    return times


def read_trace(text: str) -> list[TraceLine]:
    """Lines of JSON, in order of time. Raises BadWorkload."""
    lines = [_decoded(number, line, _TRACE_LINE) for number, line in _lines(text)]
    for line in lines:
        if line.input_length < 1 or line.output_length < 1:
            raise BadWorkload(f"lengths are at least 1, not {line.input_length} and {line.output_length}")
    return sorted(lines, key=lambda line: line.timestamp)


def read_prompts(text: str, endpoint: Endpoint) -> list[dict[str, Any]]:
    """The fields of a body that each line gives. Raises BadWorkload.

    A line is JSON (a string, or an object with `prompt` or `messages`, and `max_tokens` where that differs), or else
    the prompt itself.
    """
    return [_fields(number, line, endpoint) for number, line in _lines(text)]


def _fields(number: int, line: str, endpoint: Endpoint) -> dict[str, Any]:
    given: dict[str, Any] = {"prompt": line}
    if line.startswith(('"', "{")):
        decoded = _decoded(number, line, _PROMPT_LINE)
        given = {"prompt": decoded} if isinstance(decoded, str) else decoded
    known = {name: given[name] for name in ("prompt", "messages", "max_tokens") if name in given}
    if endpoint == "chat" and "messages" not in known:
        if not isinstance(known.get("prompt"), str):
            raise BadWorkload(f"line {number} has neither `messages` nor a `prompt` that is a text")
        known["messages"] = [{"role": "user", "content": known.pop("prompt")}]
    if endpoint == "completions" and "prompt" not in known:
        raise BadWorkload(f"line {number} has no `prompt`; `messages` are for --endpoint chat")
    return known


def _lines(text: str) -> list[tuple[int, str]]:
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise BadWorkload("it has no lines")
    return lines


def _decoded(number: int, line: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise BadWorkload(f"line {number}: {error}") from error


def _tokens(seed: str, num_tokens: int, vocabulary: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, vocabulary), k=num_tokens)


def words_of(tokens: Sequence[int]) -> str:
    """A text of about as many tokens, the same for the same ones."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)


def _asked(tokens: list[int], endpoint: Endpoint) -> dict[str, Any]:
    if endpoint == "completions":
        return {"prompt": tokens}
    return {"messages": [{"role": "user", "content": words_of(tokens)}]}


_TRACE_LINE: Final = msgspec.json.Decoder(TraceLine)
_PROMPT_LINE: Final = msgspec.json.Decoder(str | dict[str, Any])
