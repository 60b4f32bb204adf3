"""Server-sent events of a streamed completion: `data: {chunk}` lines, the last of them `data: [DONE]`.

What does not change within a call (id, model, time, fingerprint) is encoded once; a token costs the encoding of its
text and a join. What differs between surfaces is in `surfaces/`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import msgspec

from nodes.gateway.errors import ApiError
from nodes.gateway.events import Tokens
from nodes.gateway.openai_types import Usage
from nodes.gateway.responses import Head
from nodes.gateway.token_details import TokenDetails

DONE = b"data: [DONE]\n\n"

ENCODE: Final = msgspec.json.Encoder().encode


class ChunkWriter(ABC):
    """Chunks of one call as bytes; with `usage` every chunk has a usage field, mostly null.

    A choice is `{"index":N,`, `before_text`, its text, `after_text`, its logprobs and finish reason, and `more`.
    """

    before_text: ClassVar[bytes]
    after_text: ClassVar[bytes]

    def __init__(self, head: Head, details: TokenDetails, num_samples: int, *, usage: bool) -> None:
        opening = b"data: " + ENCODE(head)[:-1] + b',"choices":['
        self.details = details
        self.num_samples = num_samples
        self.opening = opening
        self.ending = b',"usage":null}\n\n' if usage else b"}\n\n"
        self._is_plain = details.is_plain
        self._before = [opening + b'{"index":%d,' % index + self.before_text for index in range(num_samples)]
        self._after = self.after_text + b',"logprobs":null,"finish_reason":'
        self._null = self._after + b"null}]" + self.ending

    def start(self) -> bytes:
        """The first events, before there is output."""
        return b""

    def delta(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        usage: Usage | None = None,
        tokens: Tokens | None = None,
    ) -> bytes:
        """Text of a sample and the tokens that came with it; `usage` as counted so far (`continuous_usage_stats`)."""
        if self._is_plain and finish_reason is None and usage is None:
            return self._before[index] + ENCODE(text) + self._null
        logprobs = b"null" if self._is_plain else ENCODE(self.logprobs(index, tokens, finish_reason))
        return self.chunk(index, text, logprobs, ENCODE(finish_reason), usage, tokens)

    def chunk(
        self, index: int, text: str, logprobs: bytes, reason: bytes, usage: Usage | None, tokens: Tokens | None
    ) -> bytes:
        """One event of a sample; `logprobs` and `reason` are JSON."""
        end = self.ending if usage is None else b',"usage":' + ENCODE(usage) + b"}\n\n"
        before, shown = self._before[index], ENCODE(text)
        if self._is_plain and logprobs == b"null":
            return b"".join((before, shown, self._after, reason, b"}]", end))
        after = self.after_text + b',"logprobs":' + logprobs + b',"finish_reason":'
        return b"".join((before, shown, after, reason, self.more(index, tokens), b"}]", end))

    @abstractmethod
    def logprobs(self, index: int, tokens: Tokens | None, finish_reason: str | None) -> msgspec.Struct | None:
        """Logprobs of a piece. Raises MalformedPayload."""

    def more(self, index: int, tokens: Tokens | None) -> bytes:
        """What follows in the choice: `,"name":value` for each field."""
        ids = self.details.ids_of(tokens)
        return b"" if ids is msgspec.UNSET else b',"token_ids":' + ENCODE(ids)

    def prompt_ids(self, index: int) -> bytes:
        """The field with the ids of a sample's prompt, as in `more`; empty if the call does not want them."""
        ids = self.details.prompt_ids_of(index)
        return b"" if ids is msgspec.UNSET else b',"prompt_token_ids":' + ENCODE(ids)

    def usage(self, usage: Usage) -> bytes:
        """The event after the last text: what all samples took."""
        return self.opening + b'],"usage":' + ENCODE(usage) + b"}\n\n"


def error_event(error: ApiError, request_id: str) -> bytes:
    """The last event of a stream that broke; OpenAI's clients raise it."""
    return b"data: " + error.body(request_id) + b"\n\n"
