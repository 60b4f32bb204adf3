"""How calls are written, for those who make a model write one: the counterpart of each parser. Pure."""

import json
from collections.abc import Mapping
from typing import Final, NamedTuple

NAME: Final = "NAME"
"""Stands for a tool's name in a form."""


class CallForm(NamedTuple):
    """`opening`, then calls with `between` them, then `closing`; a call is its `head`, its arguments and its `tail`.

    `several`: more than one can be written in an answer. `as_lines`: arguments are no JSON, but lines as Qwen3-Coder
    writes them.
    """

    head: str
    tail: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    several: bool = True
    as_lines: bool = False

    def lead(self, mark: str) -> str:
        """What follows `mark`, with which the first call begins, up to its name."""
        return (self.opening + self.head).partition(NAME)[0].removeprefix(mark)


def lark_of(text: str, marks: Mapping[str, int]) -> str:
    """Lark terms of a text in which `marks` are tokens with these ids, not letters."""
    terms: list[str] = []
    while text:
        found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
        at, _, mark = min(found, default=(len(text), 0, ""))
        if at:
            terms.append(json.dumps(text[:at], ensure_ascii=False))
        if mark:
            terms.append(f"<[{marks[mark]}]>")
        text = text[at + len(mark) :]
    return " ".join(terms)
