"""The answer that is not streamed, and what both forms say of their end. Pure."""

from collections.abc import Callable, Iterable

from msgspec import Raw
from typing_extensions import override

from nodes.gateway.parsers.events import Event
from nodes.gateway.requests.events import ABORT
from nodes.gateway.surfaces.messages.content import BlockSink, ContentBlocks
from nodes.gateway.surfaces.messages.types import (
    AnswerBlock,
    MessageUsage,
    StopReason,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
)


def stop_reason_of(
    finish_reason: str, *, has_calls: bool, stop_sequence: str | None, num_output_tokens: int, max_tokens: int
) -> StopReason:
    """`max_tokens`: what the client allowed, which may be more than the context had room for."""
    if finish_reason == ABORT:
        # Anthropic's API has no word for it; of all its words this one alone says that there was more to come.
        return "max_tokens"
    if finish_reason == "length":
        return "max_tokens" if num_output_tokens >= max_tokens else "model_context_window_exceeded"
    if stop_sequence is not None:
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


def usage_of(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> MessageUsage:
    """`num_prompt_tokens` are all of the prompt's; Anthropic's API counts those that were cached apart."""
    return MessageUsage(
        input_tokens=num_prompt_tokens - num_cached_tokens,
        cache_read_input_tokens=num_cached_tokens,
        output_tokens=num_output_tokens,
    )


class _Gathered(BlockSink):
    def __init__(self) -> None:
        self.content: list[AnswerBlock] = []
        self._pieces: list[str] = []
        self._signature = ""
        self._call_id = ""
        self._name = ""
        self._make = self._text_block

    @override
    def begin_text(self, index: int) -> None:
        self._make = self._text_block

    @override
    def begin_thinking(self, index: int) -> None:
        self._make = self._thinking_block

    @override
    def begin_call(self, index: int, call_id: str, name: str) -> None:
        self._call_id, self._name, self._make = call_id, name, self._call_block

    @override
    def text(self, index: int, text: str) -> None:
        self._pieces.append(text)

    @override
    def thinking(self, index: int, text: str) -> None:
        self._pieces.append(text)

    @override
    def arguments(self, index: int, text: str) -> None:
        self._pieces.append(text)

    @override
    def signature(self, index: int, signature: str) -> None:
        self._signature = signature

    @override
    def end(self, index: int, *, whole: bool) -> None:
        joined, self._pieces = "".join(self._pieces), []
        if whole:
            self.content.append(self._make(joined))

    def _text_block(self, text: str) -> AnswerBlock:
        return TextAnswer(text=text)

    def _thinking_block(self, text: str) -> AnswerBlock:
        return ThinkingAnswer(thinking=text, signature=self._signature)

    def _call_block(self, text: str) -> AnswerBlock:
        return ToolUseAnswer(id=self._call_id, name=self._name, input=Raw(text.encode()))


def content_of(
    events: Iterable[Event], id_of_call: Callable[[int], str], *, hides_thinking: bool = False
) -> list[AnswerBlock]:
    """All blocks of an answer."""
    gathered = _Gathered()
    blocks = ContentBlocks(gathered, id_of_call, hides_thinking=hides_thinking)
    blocks.feed(events)
    blocks.close()
    return gathered.content
