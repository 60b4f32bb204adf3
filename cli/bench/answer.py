"""One streamed answer, as a client that measures reads it. Pure.

What a server does wrong is a `Misdeed` with a kind, so that a bench can count kinds and go on.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

_MAX_LINE_BYTES: Final = 1 << 22
"""A line has a token, or a few with their logprobs; whatever else is sent must not fill the memory."""
_MAX_EVENTS: Final = 1 << 20
"""More than any context has tokens."""
_DETAIL: Final = 200
"""Characters of what a server says that are kept with each failed request."""


class Misdeed(Exception):
    """`kind`: one word or a status, as failures are counted; `detail`: what was seen, for people."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = " ".join(detail.split())[:_DETAIL]


@dataclass(slots=True)
class Sample:
    """One request. Times are of one clock in seconds; tokens are what the server's `usage` says.

    `start_s`: when it was due, or else sent. `event_times_s`: when each event with text arrived. Of a request that
    failed, `failure` is the kind and `detail` what was seen; `end_s` is 0 until it has ended.
    """

    start_s: float
    event_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    end_s: float = 0.0
    failure: str = ""
    detail: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer came."""
        return self.end_s > 0 and not self.failure


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def says_something(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        if delta is None:
            return False
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class EventLines:
    """Cuts the body of a stream, whose pieces end anywhere, into what stands behind `data:` in its lines."""

    def __init__(self) -> None:
        self.rest = b""
        """What has come of the next line."""

    def take(self, data: bytes) -> list[bytes]:
        """The lines that are whole now. Raises Misdeed `garbled`."""
        # Pieces end also in the middle of a character.
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        if len(self.rest) > _MAX_LINE_BYTES:
            raise Misdeed("garbled", f"a line of more than {_MAX_LINE_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerReader:
    """Reads the body of one streamed answer, piece by piece, into `sample`."""

    def __init__(self, sample: Sample) -> None:
        self.is_done = False
        """Whether `[DONE]` has come."""
        self._sample = sample
        self._lines = EventLines()
        self._is_counted = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Take what arrived at `now_s`. Raises Misdeed: `error_event`, `garbled`, `no_usage`, `endless`."""
        for event in self._lines.take(data):
            self._take(event, now_s)

    def ended(self) -> None:
        """The body is over. Raises Misdeed `ended_early` unless all has come."""
        if not self.is_done:
            got = f"{len(self._sample.event_times_s)} events with text"
            # What is no stream at all tells by its text what it is.
            raise Misdeed(
                "ended_early", f"no [DONE] after {got}; last: {self._lines.rest[:_DETAIL].decode(errors='replace')}"
            )

    def _take(self, data: bytes, now_s: float) -> None:
        sample = self._sample
        if data == b"[DONE]":
            if not self._is_counted:
                raise Misdeed("no_usage", "no `usage` with completion_tokens, which `include_usage` had asked for")
            self.is_done, sample.end_s = True, now_s
            return
        try:
            event = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Misdeed("garbled", f"{error}: {data[:_DETAIL].decode(errors='replace')}") from error
        if event.error is not None:
            raise Misdeed("error_event", data.decode(errors="replace"))
        if event.usage is not None:
            # Some servers say it in every event: the last counts.
            self._is_counted = True
            details = event.usage.prompt_tokens_details
            sample.num_tokens = event.usage.completion_tokens
            sample.num_prompt_tokens = event.usage.prompt_tokens
            sample.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0
        if event.choices and event.choices[0].says_something():
            if len(sample.event_times_s) >= _MAX_EVENTS:
                raise Misdeed("endless", f"more than {_MAX_EVENTS} events")
            sample.event_times_s.append(now_s)


_DECODER: Final = msgspec.json.Decoder(_Event)
