"""Text that arrives in pieces, read as if it were whole: readers are generators that yield where they need more.

What a reader decides depends on the text alone, never on where it was cut. Where a pattern does not come, or the text
ends too early, it raises `NotACall`; nothing that was not taken is lost then.
"""

import re
import sys
from collections.abc import Generator, Iterable
from typing import Final, TypeAlias, TypeVar

from nodes.gateway.parsers.json_scanner import JsonScanner

_T = TypeVar("_T")
# A reader: yields when it has read everything there is, and returns what it read.
Reading: TypeAlias = Generator[None, None, _T]
BLANKS: Final = re.compile(r"[ \t\r\n]*")


class NotACall(Exception):
    """What comes is not the form that was read for."""


class Cursor:
    """`text[taken:pos]` was read but belongs to no event yet; `text[pos:]` was not read.

    An index into `text` is valid until the next yield only; distances from `taken` are until the next `take`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.taken = 0
        self.num_takes = 0
        self.last = ""
        self.closed = False

    def add(self, text: str) -> None:
        """More text; what was taken is forgotten."""
        self.text = self.text[self.taken :] + text
        self.pos -= self.taken
        self.taken = 0

    def take(self) -> str:
        """What was read since the last time, as the source of an event."""
        source = self.text[self.taken : self.pos]
        if source:
            self.taken, self.last, self.num_takes = self.pos, source[-1], self.num_takes + 1
        return source

    def ahead(self, literal: str) -> Reading[bool]:
        """Whether exactly this comes next; reads nothing."""
        while True:
            have = self.text[self.pos : self.pos + len(literal)]
            if have == literal or self.closed or not literal.startswith(have):
                return have == literal
            yield

    def literal(self, literal: str) -> Reading[bool]:
        """Reads exactly this if it comes next."""
        found = yield from self.ahead(literal)
        if found:
            self.pos += len(literal)
        return found

    def expect(self, literal: str) -> Reading[None]:
        if not (yield from self.literal(literal)):
            raise NotACall

    def blanks(self) -> Reading[None]:
        yield from self.run(BLANKS)

    def run(self, pattern: re.Pattern[str], limit: int = sys.maxsize) -> Reading[str]:
        """Reads what matches `pattern`, which is one set of characters, up to `limit` times."""
        offset = self.pos - self.taken
        while True:
            match = pattern.match(self.text, self.pos)
            self.pos = match.end() if match else self.pos
            if self.pos - self.taken - offset > limit:
                raise NotACall
            if self.pos < len(self.text) or self.closed:
                return self.text[self.taken + offset : self.pos]
            yield

    def until(self, mark: str, limit: int) -> Reading[str]:
        """Reads up to and with `mark`, and returns what is before it: at most `limit` characters."""
        while True:
            at = self.text.find(mark, self.pos, self.pos + limit + len(mark))
            if at >= 0:
                before = self.text[self.pos : at]
                self.pos = at + len(mark)
                return before
            if self.closed or len(self.text) >= self.pos + limit + len(mark):
                raise NotACall
            yield

    def value(self, limit: int = sys.maxsize) -> Reading[str]:
        """Reads one JSON value of at most `limit` characters, and returns it as JSON."""
        offset = self.pos - self.taken
        scanner = JsonScanner()
        has_controls = False
        while True:
            self.pos = scanner.scan(self.text, self.pos)
            has_controls = has_controls or bool(scanner.controls)
            too_long = self.pos - self.taken - offset > limit
            if scanner.done and not too_long:
                written = self.text[self.taken + offset : self.pos]
                return _as_json(written) if has_controls else written
            if scanner.broken or too_long or self.closed:
                raise NotACall
            yield


def _as_json(written: str) -> str:
    """A whole value that may have line ends in strings, as JSON."""
    scanner = JsonScanner()
    scanner.scan(written, 0)
    return scanner.escaped(written, 0, len(written))


def held_suffix(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`: the longest such suffix."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
