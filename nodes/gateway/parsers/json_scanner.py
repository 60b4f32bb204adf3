"""Reads one JSON value of text that comes in pieces: where it ends, and where it stops being JSON.

Models write line ends and tabs into strings as they are; they can be told from all else, and are escaped.
"""

import json
import re
from enum import Enum, auto
from typing import Final

_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES: Final = frozenset('"\\/bfnrt')
_HEX: Final = frozenset("0123456789abcdefABCDEF")


class _Next(Enum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()


class JsonScanner:
    """`scan` reads on from where it was, until the value is `done` or `broken`; what it passed over is its own.

    `controls`: where in the text of the last scan strings have characters that JSON escapes.
    """

    def __init__(self) -> None:
        self.controls: list[int] = []
        self.done = False
        self.broken = False
        self._next = _Next.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._hex = 0
        self._word = ""

    @property
    def in_string(self) -> bool:
        """Whether what was read ends within a string."""
        return not self.broken and self._next in (_Next.STRING, _Next.ESCAPE, _Next.HEX)

    def scan(self, text: str, pos: int) -> int:
        """Reads `text` from `pos`; returns the position up to which it is (the beginning of) the value."""
        self.controls = []
        while pos < len(text) and not self.done and not self.broken:
            if self._next is _Next.STRING:
                pos = self._string(text, pos)
            elif self._next is _Next.SCALAR:
                pos = self._scalar(text, pos)
            elif self._next is _Next.ESCAPE or self._next is _Next.HEX:
                pos = self._escape(text, pos)
            else:
                match = _BLANKS.match(text, pos)
                pos = match.end() if match else pos
                if pos < len(text):
                    pos = self._structure(text[pos], pos)
        return pos

    def escaped(self, text: str, begin: int, end: int) -> str:
        """A part of the text of the last scan as JSON."""
        pieces: list[str] = []
        for pos in self.controls:
            pieces += text[begin:pos], json.dumps(text[pos])[1:-1]
            begin = pos + 1
        return "".join((*pieces, text[begin:end]))

    def _structure(self, char: str, pos: int) -> int:
        following = self._next
        if following is _Next.COLON and char == ":":
            self._next = _Next.VALUE
        elif following is _Next.COMMA_OR_END and char == ",":
            self._next = _Next.KEY if self._closers[-1] == "}" else _Next.VALUE
        elif following in (_Next.COMMA_OR_END, _Next.KEY_OR_END, _Next.VALUE_OR_END) and char == self._closers[-1]:
            self._closers.pop()
            self._value_ends()
        elif following in (_Next.KEY, _Next.KEY_OR_END) and char == '"':
            self._next, self._is_key = _Next.STRING, True
        elif following in (_Next.VALUE, _Next.VALUE_OR_END):
            return self._value_begins(char, pos)
        else:
            self.broken = True
            return pos
        return pos + 1

    def _value_begins(self, char: str, pos: int) -> int:
        if char == "{":
            self._closers.append("}")
            self._next = _Next.KEY_OR_END
        elif char == "[":
            self._closers.append("]")
            self._next = _Next.VALUE_OR_END
        elif char == '"':
            self._next, self._is_key = _Next.STRING, False
        elif char in "-0123456789tfn":
            self._next, self._word = _Next.SCALAR, ""
            return pos
        else:
            self.broken = True
            return pos
        return pos + 1

    def _string(self, text: str, pos: int) -> int:
        match = _PLAIN.match(text, pos)
        pos = match.end() if match else pos
        if pos == len(text):
            return pos
        if text[pos] == "\\":
            self._next = _Next.ESCAPE
        elif text[pos] != '"':
            self.controls.append(pos)
        elif self._is_key:
            self._next = _Next.COLON
        else:
            self._value_ends()
        return pos + 1

    def _escape(self, text: str, pos: int) -> int:
        char = text[pos]
        if self._next is _Next.HEX and char in _HEX:
            self._hex -= 1
            self._next = _Next.HEX if self._hex else _Next.STRING
        elif self._next is _Next.ESCAPE and char == "u":
            self._next, self._hex = _Next.HEX, 4
        elif self._next is _Next.ESCAPE and char in _ESCAPES:
            self._next = _Next.STRING
        else:
            self.broken = True
            return pos
        return pos + 1

    def _scalar(self, text: str, pos: int) -> int:
        """A number, or one of three words: it ends before the first character that is in none of them."""
        match = _WORD.match(text, pos)
        end = match.end() if match else pos
        self._word += text[pos:end]
        if end < len(text):
            if _SCALAR.fullmatch(self._word):
                self._value_ends()
            else:
                self.broken = True
        return end

    def _value_ends(self) -> None:
        self._next = _Next.COMMA_OR_END
        self.done = not self._closers
