"""An answer of /v1/messages as blocks, and as server-sent events `event: NAME`, `data: {"type": NAME, …}`.

    message_start  ping  (content_block_start  content_block_delta…  content_block_stop)…  message_delta  message_stop

There is no last `[DONE]`. What the prompt took is told at once, since clients count by it; how much of it was cached is
known with the first token, and told at the end. Pure.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from nodes.gateway.jobs.answer_parts import Answer, Began, Ended, More, Part, Step
from nodes.gateway.parsers.events import CallBegin, Event, Reasoning, Text
from nodes.gateway.surfaces.messages.types import (
    AnswerBlock,
    MessageUsage,
    StopReason,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
)

_ENCODE: Final = msgspec.json.Encoder().encode
_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
_TEXT: Final = b'"text_delta","text":'
_DELTAS: Final[dict[Any, bytes]] = {
    Text: _TEXT,
    Reasoning: b'"thinking_delta","thinking":',
    CallBegin: b'"input_json_delta","partial_json":',
}
_SIGNATURE: Final = b'"signature_delta","signature":'
_DELTA_END: Final = b"}}\n\n"
_MORE_TEXT: Final = _DELTA % 0 + _TEXT
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
"""Says that the answer goes on."""


def content_of(
    parts: Sequence[Part], id_of_call: Callable[[int], str], *, hides_thinking: bool = False
) -> list[AnswerBlock]:
    """All blocks of a whole answer. A call that was cut is none: its text follows, in another block."""
    return [_block(part, id_of_call, is_over=True, hides_thinking=hides_thinking) for part in parts if part.whole]


def _block(part: Part, id_of_call: Callable[[int], str], *, is_over: bool, hides_thinking: bool = False) -> AnswerBlock:
    if part.kind is Text:
        return TextAnswer(text=part.text)
    if part.kind is Reasoning:
        signature = _signature(part) if is_over else ""
        return ThinkingAnswer(thinking="" if hides_thinking else part.text, signature=signature)
    return ToolUseAnswer(id=id_of_call(part.call_index), name=part.name, input=Raw(part.text.encode() or b"{}"))


def _signature(part: Part) -> str:
    # Of the reasoning alone: the same answer has it again, however often it is made. Nobody checks it.
    return base64.b64encode(hashlib.sha256(part.text.encode("utf-8", "surrogatepass")).digest()).decode()


def event(name: str, **fields: Any) -> bytes:
    """One event; `name` is its type, too."""
    return b"event: " + name.encode() + b"\ndata: " + _ENCODE({"type": name, **fields}) + b"\n\n"


class MessageEvents:
    """The events of one answer. With `hides_thinking` of reasoning the signature alone is told."""

    def __init__(
        self, message_id: str, model: str, id_of_call: Callable[[int], str], *, hides_thinking: bool = False
    ) -> None:
        self._id = message_id
        self._model = model
        self._is_open = False
        self._answer = Answer()
        self._id_of_call = id_of_call
        self._hides_thinking = hides_thinking

    def start(self, num_prompt_tokens: int) -> bytes:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": MessageUsage(input_tokens=num_prompt_tokens, output_tokens=0),
        }
        return event("message_start", message=message) + PING

    def events(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._told, self._answer.feed(events)))

    def text(self, text: str) -> bytes:
        """A piece of an answer that no parser reads: all of it is text."""
        if self._is_open:
            return _MORE_TEXT + _ENCODE(text) + _DELTA_END
        self._is_open = True
        return self.events([Text(text)])

    def end(self, stop_reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> bytes:
        last = b"".join(map(self._told, self._answer.close()))
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return last + event("message_delta", delta=delta, usage=usage) + event("message_stop")

    def _told(self, step: Step) -> bytes:
        match step:
            case Began(part):
                block = _block(part, self._id_of_call, is_over=False)
                return event("content_block_start", index=part.index, content_block=block)
            case More(part, text):
                # One comes with every token: half as long as by way of a dict.
                is_hidden = self._hides_thinking and part.kind is Reasoning
                return b"" if is_hidden else _DELTA % part.index + _DELTAS[part.kind] + _ENCODE(text) + _DELTA_END
            case Ended(part):
                signed = b""
                if part.kind is Reasoning:
                    signed = _DELTA % part.index + _SIGNATURE + _ENCODE(_signature(part)) + _DELTA_END
                return signed + event("content_block_stop", index=part.index)
