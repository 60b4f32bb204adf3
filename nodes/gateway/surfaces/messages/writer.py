"""Server-sent events of one streamed message: `event: NAME`, `data: {"type": NAME, …}`; there is no last `[DONE]`.

    message_start  ping  (content_block_start  content_block_delta…  content_block_stop)…  message_delta  message_stop

What the prompt took is told at once, since clients count by it; how much of it was cached is known with the first
token, and told at the end. Pure.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from typing_extensions import override

from nodes.gateway.parsers.events import Event
from nodes.gateway.surfaces.messages.content import BlockSink, ContentBlocks
from nodes.gateway.surfaces.messages.types import MessageUsage, StopReason

_ENCODE: Final = msgspec.json.Encoder().encode
_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
_TEXT: Final = b'"text_delta","text":'
_DELTA_END: Final = b"}}\n\n"
_MORE_TEXT: Final = _DELTA % 0 + _TEXT
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
"""Says that the answer goes on."""


class _EventSink(BlockSink):
    def __init__(self) -> None:
        self._events: list[bytes] = []

    def take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    @override
    def begin_text(self, index: int) -> None:
        self._begin(index, {"type": "text", "text": ""})

    @override
    def begin_thinking(self, index: int) -> None:
        self._begin(index, {"type": "thinking", "thinking": "", "signature": ""})

    @override
    def begin_call(self, index: int, call_id: str, name: str) -> None:
        self._begin(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}})

    @override
    def text(self, index: int, text: str) -> None:
        self._delta(index, _TEXT, text)

    @override
    def thinking(self, index: int, text: str) -> None:
        self._delta(index, b'"thinking_delta","thinking":', text)

    @override
    def signature(self, index: int, signature: str) -> None:
        self._delta(index, b'"signature_delta","signature":', signature)

    @override
    def arguments(self, index: int, text: str) -> None:
        self._delta(index, b'"input_json_delta","partial_json":', text)

    @override
    def end(self, index: int, *, whole: bool) -> None:
        self._events.append(event("content_block_stop", index=index))

    def _begin(self, index: int, block: dict[str, Any]) -> None:
        self._events.append(event("content_block_start", index=index, content_block=block))

    def _delta(self, index: int, kind: bytes, text: str) -> None:
        # One comes with every token: half as long as by way of a dict.
        self._events.append(_DELTA % index + kind + _ENCODE(text) + _DELTA_END)


def event(name: str, **fields: Any) -> bytes:
    """One event; `name` is its type, too."""
    return b"event: " + name.encode() + b"\ndata: " + _ENCODE({"type": name, **fields}) + b"\n\n"


class MessageEvents:
    """The events of one answer."""

    def __init__(
        self, message_id: str, model: str, id_of_call: Callable[[int], str], *, hides_thinking: bool = False
    ) -> None:
        self._id = message_id
        self._model = model
        self._is_open = False
        self._sink = _EventSink()
        self._blocks = ContentBlocks(self._sink, id_of_call, hides_thinking=hides_thinking)

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
        self._blocks.feed(events)
        return self._sink.take()

    def text(self, text: str) -> bytes:
        """A piece of an answer that no parser reads: all of it is text."""
        if self._is_open:
            return _MORE_TEXT + _ENCODE(text) + _DELTA_END
        self._is_open = True
        self._blocks.text(text)
        return self._sink.take()

    def end(self, stop_reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> bytes:
        self._blocks.close()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return self._sink.take() + event("message_delta", delta=delta, usage=usage) + event("message_stop")
