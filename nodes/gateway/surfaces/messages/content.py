"""From what a parser says to the blocks of an answer's content, the same for streamed and whole answers. Pure.

A block begins with the first event of its kind and ends with one of another kind. Blocks are numbered from 0.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, End, Event, Mark, Reasoning, Text


class BlockSink(Protocol):
    """What is told of each block, in order: `begin_…`, any number of `text`s, `thinking`s or `arguments`, `end`.

    A call that was cut ends not `whole`; its text follows, in another block.
    """

    def begin_text(self, index: int) -> None:
        """A block of text."""
        ...

    def begin_thinking(self, index: int) -> None:
        """A block of reasoning."""
        ...

    def begin_call(self, index: int, call_id: str, name: str) -> None:
        """A call of a tool."""
        ...

    def text(self, index: int, text: str) -> None:
        """More of the block's text."""
        ...

    def thinking(self, index: int, text: str) -> None:
        """More of the block's reasoning."""
        ...

    def signature(self, index: int, signature: str) -> None:
        """All of the block's reasoning was told; ahead of its end."""
        ...

    def arguments(self, index: int, text: str) -> None:
        """More of the call's arguments, as JSON."""
        ...

    def end(self, index: int, *, whole: bool) -> None:
        """Nothing more of the block comes."""
        ...


class ContentBlocks:
    """One answer's blocks. With `hides_thinking` of reasoning the signature alone is told."""

    def __init__(self, sink: BlockSink, id_of_call: Callable[[int], str], *, hides_thinking: bool = False) -> None:
        self._sink: Final = sink
        self._id_of_call = id_of_call
        self._hides_thinking = hides_thinking
        self._index = -1
        self._kind: type[Text | Reasoning | CallBegin] | None = None
        self._digest = hashlib.sha256()

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Text(text):
                    self.text(text)
                case Reasoning(text):
                    self._reasoning(text)
                case CallBegin(call_index, name, _):
                    self._begin(CallBegin)
                    self._sink.begin_call(self._index, self._id_of_call(call_index), name)
                case CallArguments(_, text, _):
                    if text:
                        self._sink.arguments(self._index, text)
                case CallEnd(_, whole, _):
                    self.close(whole=whole)
                case Mark() | End():
                    pass

    def text(self, text: str) -> None:
        if self._kind is not Text:
            self._begin(Text)
            self._sink.begin_text(self._index)
        self._sink.text(self._index, text)

    def _reasoning(self, text: str) -> None:
        if self._kind is not Reasoning:
            self._begin(Reasoning)
            self._digest = hashlib.sha256()
            self._sink.begin_thinking(self._index)
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        if not self._hides_thinking:
            self._sink.thinking(self._index, text)

    def _begin(self, kind: type[Text | Reasoning | CallBegin]) -> None:
        self.close()
        self._kind = kind
        self._index += 1

    def close(self, *, whole: bool = True) -> None:
        """The open block ends, if there is one."""
        if self._kind is Reasoning:
            # Of the reasoning alone: the same answer has it again, however often it is made. Nobody checks it.
            self._sink.signature(self._index, base64.b64encode(self._digest.digest()).decode())
        if self._kind is not None:
            self._kind = None
            self._sink.end(self._index, whole=whole)
