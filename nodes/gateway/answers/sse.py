"""Server-sent events of a streamed answer: what writes them for a surface, and the form that two of them share.

What does not change within a call (id, model, time, fingerprint) is encoded once; a token costs the encoding of its
text and a join. What differs between surfaces is in `surfaces/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec
from typing_extensions import override

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import extension_of, total_usage, usage_of, usage_so_far
from nodes.gateway.errors import OPENAI_ERRORS, ApiError
from nodes.gateway.parsers.events import Event, Text
from nodes.gateway.requests.events import End, Tokens

DONE = b"data: [DONE]\n\n"

ENCODE: Final = msgspec.json.Encoder().encode


class Writer(ABC):
    """Writes the events of one call. Samples have numbers; `end` is with the last piece of each, after its events.

    `ping` is an event without news, for a surface that has one: it breaks long silences.
    """

    ping: ClassVar[bytes] = b""

    def start(self) -> bytes:
        """The first events, before there is output."""
        return b""

    def text(self, number: int, text: str, end: End | None, tokens: Tokens | None) -> bytes:
        """A piece of a sample that is not taken apart: its text and the tokens that came with it."""
        return self.piece(number, [Text(text)] if text else [], end, tokens)

    @abstractmethod
    def piece(self, number: int, events: Sequence[Event], end: End | None, tokens: Tokens | None) -> bytes:
        """A piece of a sample, taken apart; no event of it may be one to show."""

    async def settle(self) -> None:  # noqa: B027 - few have anything to do
        """What has to be done before the last events are written."""

    @abstractmethod
    def finish(self) -> bytes:
        """The last events, once all samples have ended."""

    @abstractmethod
    def error(self, error: ApiError) -> bytes:
        """The last event of an answer that broke."""


class ChunkWriter(Writer):
    """Lines `data: {chunk}`, the last of them `data: [DONE]`.

    A choice is `{"index":N,`, `before_text`, its text, `after_text`, its logprobs and finish reason, and `more`.
    """

    before_text: ClassVar[bytes]
    after_text: ClassVar[bytes]

    def __init__(self, answering: Answering) -> None:
        head, job, self.generation, self.details, self._answers = answering
        self.num_samples = len(self.generation.output.samples)
        self.opening = opening = b"data: " + ENCODE(head)[:-1] + b',"choices":['
        # With usage asked for every chunk has the field, mostly null.
        self.ending = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"
        self._request_id = head.id
        self._includes_usage = job.include_usage
        self._shows_cached = job.tokens.cached
        self._counts_on = job.continuous_usage
        self._is_plain = self.details.is_plain and not self._counts_on
        self._before = [opening + b'{"index":%d,' % number + self.before_text for number in range(self.num_samples)]
        self._after = self.after_text + b',"logprobs":null,"finish_reason":'
        self._null = self._after + b"null}]" + self.ending

    @override
    def text(self, number: int, text: str, end: End | None, tokens: Tokens | None) -> bytes:
        if self._is_plain and end is None:
            return self._before[number] + ENCODE(text) + self._null
        lead = self.lead(number)
        reason = None if end is None else end.finish_reason
        logprobs = b"null" if self._is_plain else ENCODE(self.logprobs(number, tokens, reason))
        shown = self.before_text + ENCODE(text) + self.after_text
        return lead + self.chunk(number, shown, logprobs, reason, self.more(number, tokens, end))

    def lead(self, number: int) -> bytes:
        """Events to be written before a piece of a sample whose chunks show more than text."""
        return b""

    @override
    def piece(self, number: int, events: Sequence[Event], end: End | None, tokens: Tokens | None) -> bytes:
        return self.text(number, "".join(event.text for event in events if isinstance(event, Text)), end, tokens)

    def chunk(self, number: int, shown: bytes, logprobs: bytes, reason: str | None, more: bytes) -> bytes:
        """One event of a sample; what it shows, its logprobs and what follows are JSON."""
        end = self.ending_of(number)
        after = (b',"logprobs":', logprobs, b',"finish_reason":', ENCODE(reason), more, b"}]", end)
        return b"".join((self.opening, b'{"index":%d,' % number, shown, *after))

    def ending_of(self, number: int, *, is_first: bool = False) -> bytes:
        """What ends a chunk of a sample: the usage so far, where each chunk has it (`continuous_usage_stats`)."""
        if not self._counts_on:
            return self.ending
        usage = usage_so_far(self.generation, self._answers, number)
        if is_first:
            # Tokens may have come before it is written; none of them is shown yet.
            usage = usage_of(usage.prompt_tokens, 0, usage.prompt_tokens_details.cached_tokens, 0)
        return b',"usage":' + ENCODE(usage) + b"}\n\n"

    @abstractmethod
    def logprobs(self, number: int, tokens: Tokens | None, finish_reason: str | None) -> msgspec.Struct | None:
        """Logprobs of a piece. Raises MalformedPayload."""

    def more(self, number: int, tokens: Tokens | None, end: End | None) -> bytes:
        """What follows in the choice: `,"name":value` for each field."""
        ids, stop = self.details.ids_of(tokens), self.details.stop_of(end)
        more = b"" if ids is msgspec.UNSET else b',"token_ids":' + ENCODE(ids)
        return more if stop is None else more + b"," + ENCODE(stop)[1:-1]

    def prompt_ids(self, number: int) -> bytes:
        """The field with the ids of a sample's prompt, as in `more`; empty if the call does not want them."""
        ids = self.details.prompt_ids_of(number)
        return b"" if ids is msgspec.UNSET else b',"prompt_token_ids":' + ENCODE(ids)

    @override
    def finish(self) -> bytes:
        extension = extension_of(self.generation) if self._shows_cached else msgspec.UNSET
        more = b"" if extension is msgspec.UNSET else self.opening + b'],"sglext":' + ENCODE(extension) + self.ending
        return more + self._usage() + DONE

    @override
    def error(self, error: ApiError) -> bytes:
        # Before it, since clients' libraries read nothing behind an error.
        return self._usage() + OPENAI_ERRORS.event(error, self._request_id)

    def _usage(self) -> bytes:
        """The event with the whole call's usage, if that is asked for."""
        if not self._includes_usage:
            return b""
        return self.opening + b'],"usage":' + ENCODE(total_usage(self.generation, self._answers)) + b"}\n\n"
