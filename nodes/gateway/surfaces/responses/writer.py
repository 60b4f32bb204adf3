"""The stream of a response: `event: response.…` with `data: {…}`, numbered from 0. Pure.

    created, in_progress, for each item output_item.added … output_item.done, completed | incomplete | failed

Each piece of text costs the encoding of it and a join; what surrounds it is encoded once for each message.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from nodes.gateway.answers.sse import ENCODE
from nodes.gateway.errors import ApiError
from nodes.gateway.fields.openai_types import DrawnTokenLogprob, Usage
from nodes.gateway.parsers.events import Event, Text
from nodes.gateway.requests.events import ABORT
from nodes.gateway.surfaces.responses.answer import (
    IncompleteDetails,
    InputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from nodes.gateway.surfaces.responses.output import CallId, Output
from nodes.gateway.surfaces.responses.tools import ToolTable

_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of a response that failed, by status; the others are `server_error`."""


class Found(NamedTuple):
    """What a parser found, and for text the tokens of it, if logprobs were asked for."""

    event: Event
    logprobs: Sequence[DrawnTokenLogprob] = ()


class ResponseWriter:
    """Events of one response as bytes. `response` is what is known of it at the beginning.

    A response that is not streamed is made in the same way, and its bytes are dropped.
    """

    def __init__(self, response: Response, tools: ToolTable, call_id: CallId, *, seals_reasoning: bool = False) -> None:
        self._response = response
        self._output = Output(response.id, tools, call_id, self._add, seals_reasoning=seals_reasoning)
        self._number = 0
        self._events: list[bytes] = []
        self._written = ""
        self._delta: tuple[bytes, bytes] = (b"", b"")

    def start(self) -> bytes:
        """The first events, before there is output."""
        self._add("created", {"response": self._response})
        self._add("in_progress", {"response": self._response})
        return self._flush()

    def piece(self, found: Iterable[Found]) -> bytes:
        """Whatever came with a piece of the sample."""
        for event, logprobs in found:
            if isinstance(event, Text):
                if self._output.repeats_call():
                    continue
                self._text(event.text, logprobs)
            else:
                self._output.take(event)
        return self._flush()

    def text(self, text: str) -> bytes:
        """More of the message, where an answer is nothing else."""
        self._text(text, ())
        return self._flush()

    def close(self, finish_reason: str) -> bytes:
        """The sample has ended: so have all items."""
        self._output.close(_item_status(finish_reason))
        return self._flush()

    def ended(self, finish_reason: str, usage: Usage, now: int) -> Response:
        """The whole response, once closed."""
        status = _item_status(finish_reason)
        return replace(
            self._response,
            status=status,
            completed_at=now,
            # OpenAI's clients know no reason for one that was aborted.
            incomplete_details=IncompleteDetails() if finish_reason == "length" else None,
            output=self._output.items,
            usage=_usage(usage),
        )

    def end(self, response: Response) -> bytes:
        """The last event."""
        self._add(response.status, {"response": response})
        return self._flush()

    def failed(self, error: ApiError) -> bytes:
        """The last event of a response that broke: what came of it, and why there is no more."""
        number = self._number
        self._output.close("incomplete")
        # Nobody is told that items are done: agents run calls that are.
        self._events.clear()
        self._number = number
        code: Any = _CODES.get(error.status, "server_error")
        said = ResponseError(code=code, message=error.message, type=error.code or error.type, param=error.param)
        broken = replace(self._response, status="failed", error=said, output=self._output.items)
        self._add("failed", {"response": broken})
        return self._flush()

    def error(self, error: ApiError) -> bytes:
        """The last event where this server does not know what became of the response."""
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + ENCODE({**said, "sequence_number": self._number}) + b"\n\n"

    def _text(self, text: str, logprobs: Sequence[DrawnTokenLogprob]) -> None:
        output = self._output
        output.text(text, logprobs)
        # Once for each message: three fields of a delta that stay the same for all its tokens.
        if output.open_id != self._written:
            self._written = output.open_id
            at = ENCODE({"item_id": output.open_id, "output_index": len(output.items) - 1, "content_index": 0})[1:-1]
            self._delta = (
                b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",' + at
                + b',"sequence_number":', b',"delta":',
            )  # fmt: skip
        number, self._number = self._number, self._number + 1
        end = b',"logprobs":[]}\n\n' if not logprobs else b',"logprobs":' + ENCODE(logprobs) + b"}\n\n"
        self._events.append(b"%b%d%b%b%b" % (self._delta[0], number, self._delta[1], ENCODE(text), end))

    def _add(self, name: str, fields: dict[str, Any]) -> None:
        number, self._number = self._number, self._number + 1
        kind = f"response.{name}"
        said = ENCODE({"type": kind, "sequence_number": number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), said))

    def _flush(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


def _item_status(finish_reason: str) -> Any:
    return "incomplete" if finish_reason in ("length", ABORT) else "completed"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=usage.completion_tokens_details,
        total_tokens=usage.total_tokens,
    )
