"""An answer as its parts: text, reasoning and calls, in the order in which the model began them. Pure.

All surfaces make theirs of it: streams are written from the steps by which it grows, whole answers from its parts.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text


class Part:
    """One of them. `kind` is the event that it began with, `index` its place in the answer.

    Of a call there are the function's `name` and its `call_index`; one that was cut or went wrong is not
    `whole`, and its text follows in another part.
    """

    __slots__ = ("call_index", "index", "kind", "name", "pieces", "whole")

    def __init__(
        self, kind: type[Text | Reasoning | CallBegin], index: int, call_index: int = -1, name: str = ""
    ) -> None:
        self.kind = kind
        self.index = index
        self.call_index = call_index
        self.name = name
        self.pieces: list[str] = []
        self.whole = True

    @property
    def text(self) -> str:
        """Of a call, its arguments."""
        return "".join(self.pieces)


class Began(NamedTuple):
    """A part begins, and is empty."""

    part: Part


class More(NamedTuple):
    """More of the part that began last."""

    part: Part
    text: str


class Ended(NamedTuple):
    """Nothing more of the part comes."""

    part: Part


Step = Began | More | Ended


class Answer:
    """`parts` so far. Only the last may be open. Steps are taken one by one, each before the part goes on."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None

    def feed(self, events: Iterable[Event]) -> Iterator[Step]:
        """What the events add."""
        for event in events:
            part = self._open
            match event:
                case Text(text) | Reasoning(text):
                    if part is None or part.kind is not type(event):
                        yield from self._begin(part := Part(type(event), len(self.parts)))
                    part.pieces.append(text)
                    yield More(part, text)
                case CallBegin(index, name, _):
                    yield from self._begin(Part(CallBegin, len(self.parts), index, name))
                case CallArguments(_, text, _) if text and part is not None:
                    part.pieces.append(text)
                    yield More(part, text)
                case CallEnd(_, whole, _):
                    yield from self.close(whole=whole)
                case _:
                    pass

    def close(self, *, whole: bool = True) -> Iterator[Step]:
        """The open part ends, if there is one."""
        part, self._open = self._open, None
        if part is not None:
            part.whole = whole
            yield Ended(part)

    def _begin(self, part: Part) -> Iterator[Step]:
        yield from self.close()
        self._open = part
        self.parts.append(part)
        yield Began(part)


def parts_of(events: Iterable[Event]) -> list[Part]:
    """Those of a whole answer."""
    answer = Answer()
    for _ in answer.feed(events):
        pass
    return answer.parts
