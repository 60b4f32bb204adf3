"""What the parsers share: text goes in, in pieces; events come out once they are certain."""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import ClassVar, Final, Protocol, runtime_checkable

from nodes.gateway.parsers.cursor import Cursor, Reading, held_suffix
from nodes.gateway.parsers.events import Event, Mark, Reasoning, Text


@runtime_checkable
class Parser(Protocol):
    """One for each sample. `feed` gets its text exactly once and in order, cut anywhere; `close` gives what is left."""

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with this text."""
        ...

    def close(self) -> list[Event]:
        """What was held back, without `End`. Called once."""
        ...


class Stage(ABC):
    """Runs `_run`, a generator that reads `cursor` and emits events, as far as the text goes.

    `triggers` are what ends plain text. `marks` are all that a model writes around what it says; a tokenizer that
    calls one of them special must not leave it out of the text.
    """

    triggers: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.cursor: Final = Cursor()
        self._events: list[Event] = []
        self._kind: type[Text | Reasoning] = Text
        # Blanks are held while it is open whether text or a call follows: they are text before text only.
        self._in_gap = True
        self._made_calls = False
        # Plain text, nothing held: a piece without the first character of any trigger goes out as it came.
        self._idle = False
        self._trigger = re.compile("|".join(re.escape(mark) for mark in self.triggers) or r"(?!)")
        firsts = "".join(sorted({mark[0] for mark in self.triggers}))
        self._near = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._reading: Generator[None] = self._run()

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with this piece of text."""
        if self._idle and not self._near.search(text):
            if not text:
                return []
            self.cursor.last = text[-1]
            return [self._kind(text)]
        self.cursor.add(text)
        return self._resume()

    def close(self) -> list[Event]:
        """What was held. Called once, when the answer has ended or was cut."""
        self.cursor.closed = True
        return self._resume()

    @abstractmethod
    def _run(self) -> Generator[None]:
        """Reads to the end of the text; yields where it needs more."""

    def _resume(self) -> list[Event]:
        self._idle = False
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    def _until_trigger(self) -> Reading[str]:
        """Emits text up to a trigger, which it returns unread; nothing at the end. Blanks of a gap stay untaken."""
        cursor = self.cursor
        while True:
            found = self._find()
            if found:
                cursor.pos = found.start()
            elif cursor.closed:
                cursor.pos = len(cursor.text)
            else:
                cursor.pos = len(cursor.text) - held_suffix(cursor.text[cursor.taken :], self.triggers)
            if not self._in_gap or cursor.text[cursor.taken : cursor.pos].strip(" \t\r\n"):
                self._in_gap = False
                self._emit_text()
            elif cursor.closed and not found and self._made_calls:
                self._emit_mark()
            elif cursor.closed and not found:
                self._emit_text()
            if found:
                return found.group()
            if cursor.closed:
                return ""
            self._idle = cursor.taken == len(cursor.text) and not self._in_gap
            yield

    def _find(self) -> re.Match[str] | None:
        return self._trigger.search(self.cursor.text, self.cursor.taken)

    def _emit_text(self) -> None:
        text = self.cursor.take()
        if text:
            self._events.append(self._kind(text))

    def _emit_mark(self) -> None:
        source = self.cursor.take()
        if source:
            self._events.append(Mark(source))
