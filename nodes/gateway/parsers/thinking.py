"""Reasoning between two marks before the answer: `<think>…</think>`, `[THINK]…[/THINK]`.

The rendered prompt's end says where the model begins: after an opened mark, after a closed one, or before both.
"""

from collections.abc import Generator
from typing import ClassVar

from typing_extensions import override

from nodes.gateway.parsers.events import Event, Reasoning, Text
from nodes.gateway.parsers.stage import Stage


class Thinking(Stage):
    """Reasoning that the model opens itself, as the first thing it says, or that the prompt opened.

    Without a closing mark all of it is reasoning. Blanks around reasoning belong to what they touch.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    triggers: ClassVar[tuple[str, ...]] = (closing,)
    marks: ClassVar[tuple[str, ...]] = (opening, closing)
    # Whether an answer that opens nothing is reasoning all the same, until the closing mark.
    assumed: ClassVar[bool] = False

    @property
    def is_open(self) -> bool:
        """Whether an answer begins with reasoning, for all that the prompt says."""
        return self._opened or self.assumed

    def __init__(self, prompt_tail: str = "") -> None:
        tail = prompt_tail.rstrip()
        self._opened = tail.endswith(self.opening)
        self.ended = tail.endswith(self.closing)
        super().__init__()

    @override
    def feed(self, text: str) -> list[Event]:
        if self.ended:
            return [Text(text)] if text else []
        return super().feed(text)

    @override
    def _run(self) -> Generator[None]:
        cursor = self.cursor
        if not self._opened:
            yield from cursor.blanks()
            if (yield from cursor.literal(self.opening)):
                self._emit_mark()
                self._opened = True
            cursor.pos = cursor.taken
        if self._opened or self.assumed:
            self._kind, self._in_gap = Reasoning, False
            found = yield from self._until_trigger()
            cursor.pos += len(found)
            self._emit_mark()
        self.ended = True
        self._kind = Text
        cursor.pos = len(cursor.text)
        self._emit_text()


class Qwen3Thinking(Thinking):
    """Qwen 3: the model opens its reasoning, or the template of a later one does."""


class DeepSeekR1Thinking(Thinking):
    """DeepSeek R1 and its distillations, which may leave out the opening mark."""

    assumed: ClassVar[bool] = True


class DeepSeekV3Thinking(Thinking):
    """DeepSeek V3.1, which thinks only where the prompt opens it, and answers results of tools without a mark."""


class MistralThinking(Thinking):
    """Magistral, whose marks are special tokens."""

    opening: ClassVar[str] = "[THINK]"
    closing: ClassVar[str] = "[/THINK]"
    triggers: ClassVar[tuple[str, ...]] = (closing,)
    marks: ClassVar[tuple[str, ...]] = (opening, closing)
