"""Server-sent events of a streamed completion: `data: {chunk}` lines, the last of them `data: [DONE]`.

What does not change within a call (id, model, time, fingerprint) is encoded once; a token costs the encoding of its
text and a join. Made by `completions.py`, one for each call.
"""

import msgspec

from nodes.gateway.errors import ApiError
from nodes.gateway.openai_types import Usage
from nodes.gateway.responses import Head

DONE = b"data: [DONE]\n\n"

_ENCODE = msgspec.json.Encoder().encode


class ChunkWriter:
    """Chunks of one call as bytes. `kind` is chat or text; with `usage` every chunk has a usage field, mostly null."""

    def __init__(self, head: Head, *, kind: str, num_samples: int, usage: bool) -> None:
        opening = b"data: " + _ENCODE(head)[:-1] + b',"choices":['
        self._opening = opening
        self._is_chat = kind == "chat"
        # `{"index":N,` is followed by the text of the sample, which is followed by `_after`.
        key = b'"delta":{"content":' if self._is_chat else b'"text":'
        self._before = [opening + b'{"index":%d,' % index + key for index in range(num_samples)]
        after = b'},"logprobs":null,"finish_reason":' if self._is_chat else b',"logprobs":null,"finish_reason":'
        self._after = after
        self._end = b',"usage":null}\n\n' if usage else b"}\n\n"
        self._null = after + b"null}]" + self._end

    def start(self) -> bytes:
        """The first event of each sample: a chat message has a role before it has text."""
        if not self._is_chat:
            return b""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"".join(
            self._opening + b'{"index":%d,' % index + role + self._end for index in range(len(self._before))
        )

    def delta(self, index: int, text: str, finish_reason: str | None, usage: Usage | None = None) -> bytes:
        """Text of a sample; with `usage` as counted so far (`continuous_usage_stats`)."""
        if finish_reason is None and usage is None:
            return self._before[index] + _ENCODE(text) + self._null
        end = self._end if usage is None else b',"usage":' + _ENCODE(usage) + b"}\n\n"
        return b"".join((self._before[index], _ENCODE(text), self._after, _ENCODE(finish_reason), b"}]", end))

    def usage(self, usage: Usage) -> bytes:
        return self._opening + b'],"usage":' + _ENCODE(usage) + b"}\n\n"


def error_event(error: ApiError, request_id: str) -> bytes:
    """The last event of a stream that broke; OpenAI's clients raise it."""
    return b"data: " + error.body(request_id) + b"\n\n"
