"""The oracle: all that a client can tell of one answer, and how it differs from the one that it should be. Pure.

`tests/chaos` and `meshctl chaos` compare answers of a mesh that is struck with those of the same mesh left alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from cli.bench.answer import EventLines, Misdeed

CANCELLED: Final = "cancelled"
"""Kind of the Misdeed, of the client's own, that breaks off an answer which nobody waits for any more."""
_MAX_BODY_BYTES: Final = 1 << 24
"""Some hundred tokens with their logprobs have 100 KB; whatever else is sent must not fill the memory."""


@dataclass
class Answer:
    """What one client has got. If that is not all of it, `failure` is a kind as `cli.bench.client.stream` lists them.

    `num_events` counts choices that arrived; `request_id` is the mesh's name for it, once one has; `is_open`: whether
    there is a connection over which more may come.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[Any] = field(default_factory=list[Any])
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None
    num_events: int = 0
    request_id: str = ""
    is_open: bool = False
    failure: str = ""
    detail: str = ""

    @property
    def broken(self) -> str:
        """Why it is not whole, for people; empty if it is."""
        return f"{self.failure}: {self.detail}" if self.failure else ""

    @property
    def whole(self) -> tuple[Any, ...]:
        """What must not depend on which actors died. Cached tokens do: they are a matter of timing."""
        return self.text, self.finish_reason, self.usage, self.failure, self.token_ids, self.logprobs


class StreamReader:
    """Gathers a stream into `answer`; calls `on_event` after each choice that has arrived.

    With `cancel_after`, raises Misdeed `cancelled` once so many have: the client goes away.
    """

    def __init__(self, answer: Answer, on_event: Callable[[], object], cancel_after: int = 0) -> None:
        self.is_done = False
        self._answer = answer
        self._on_event = on_event
        self._cancel_after = cancel_after
        self._lines = EventLines()

    def feed(self, data: bytes, now_s: float) -> None:
        """Raises Misdeed: `error_event`, `garbled`, `cancelled`."""
        for line in self._lines.take(data):
            if line == b"[DONE]":
                self.is_done = True
                return
            _take(_decoded(line, "garbled"), self._answer, self._on_event)
            if self._cancel_after and self._answer.num_events >= self._cancel_after:
                raise Misdeed(CANCELLED, f"after {self._answer.num_events} events")

    def ended(self) -> None:
        """Raises Misdeed `ended_early` unless all has come."""
        if not self.is_done:
            raise Misdeed("ended_early", f"no [DONE] after {self._answer.num_events} events: the connection was closed")


class WholeReader:
    """Takes an answer that is not streamed, text or vectors, into `answer`."""

    is_done = False

    def __init__(self, answer: Answer, on_event: Callable[[], object]) -> None:
        self._answer = answer
        self._on_event = on_event
        self._body = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Raises Misdeed `garbled` if there is no end of it."""
        self._body += data
        if len(self._body) > _MAX_BODY_BYTES:
            raise Misdeed("garbled", f"more than {_MAX_BODY_BYTES} bytes")

    def ended(self) -> None:
        """Raises Misdeed `ended_early` unless all has come."""
        answered, answer = _decoded(self._body, "ended_early"), self._answer
        if "choices" in answered:
            _take(answered, answer, self._on_event)
            return
        answer.text = " ".join(one["embedding"] for one in answered["data"])
        answer.usage = answered["usage"]["prompt_tokens"], len(answered["data"])
        answer.finish_reason = "vectors"
        answer.num_events += 1
        self._on_event()


def differences(got: Sequence[Answer], wanted: Sequence[Answer]) -> list[str]:
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


def begins(part: Answer, whole: Answer) -> bool:
    """Whether an answer that was broken off is, as far as it came, what the whole one begins with."""
    return (
        whole.text.startswith(part.text)
        and whole.token_ids[: len(part.token_ids)] == part.token_ids
        and whole.logprobs[: len(part.logprobs)] == part.logprobs
    )


def _decoded(data: bytes, kind: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Misdeed(kind, f"{error}: {data[:80].decode(errors='replace')}") from error


def _take(event: Any, answer: Answer, on_event: Callable[[], object]) -> None:
    if "error" in event:
        raise Misdeed("error_event", str(event["error"]))
    try:
        answer.request_id = event.get("id", "")
        if event.get("usage"):
            answer.usage = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            answer.text += choice["text"] if "text" in choice else _said(choice.get("delta", choice.get("message")))
            answer.token_ids += choice.get("token_ids") or []
            answer.logprobs += _logprobs(choice.get("logprobs") or {})
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            answer.num_events += 1
            on_event()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # A damaged answer is what this looks for; it must not end the loop that reads all the others.
        raise Misdeed("garbled", f"{error!r} in {str(event)[:80]}") from error


def _logprobs(found: dict[str, Any]) -> list[Any]:
    # Token by token: how many of them an event has is a matter of timing.
    if "content" in found:
        return list(found["content"] or [])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(found[name] for name in names), strict=True)) if found else []


def _said(message: dict[str, Any]) -> str:
    """Text and calls in their order; not the ids of calls, which are new for each request."""
    calls = [
        (call["function"].get("name") or "") + call["function"]["arguments"] for call in message.get("tool_calls") or ()
    ]
    return (message.get("content") or "") + "".join(calls)


def _first_other(what: str, got: Sequence[Any], wanted: Sequence[Any]) -> str:
    for at, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return f"{what} {at} is {one}, not {other}"
    return f"{len(got)} of {len(wanted)} {what}s"
