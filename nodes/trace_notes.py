"""What schedulers note of requests in their trace rings (`mesh/runtime/trace_ring.py`), and how it reads."""

import enum
from typing import Final

from mesh.runtime.trace_ring import Note


class Noted(enum.IntEnum):
    """Of a request; `a` and `b` as below. Numbers are in files that a later release may read: they never change."""

    ARRIVED = 1  # attempt, tokens
    ORDERED = 2  # attempt, tokens: another scheduler wants its prefill
    ADMITTED = 3  # tokens that are cached, 1 if it is prefilled elsewhere
    GRANTED = 4  # pages into which another scheduler's are copied
    CHUNK = 5  # first position, tokens: part of a step that leaves for the worker
    PULLED = 6  # pages that have come so far, 1 if these are all
    PREFILLED = 7  # tokens that were cached there
    PUT_BACK = 8  # tokens that are computed again, or read from the cache
    LEFT = 9  # tokens, output included: it holds nothing here any more
    NO_PAGES = 10  # pages that it needs to begin, pages that are free or can be evicted: it is the next to enter


STEP: Final = 1
"""A step was acknowledged: `key` is its number, `a` its rows in the upper 12 bits and its tokens, `b` µs it took."""

_TEXTS: Final = {
    Noted.ARRIVED: "attempt {a} arrives, {b} tokens",
    Noted.ORDERED: "its prefill is ordered (attempt {a}), {b} tokens",
    Noted.GRANTED: "{a} pages are granted, the prefill is ordered",
    Noted.CHUNK: "a chunk leaves in a step: tokens {a} to {end}",
    Noted.PREFILLED: "prefilled; {a} tokens were cached there",
    Noted.PUT_BACK: "put back, with {a} tokens",
    Noted.LEFT: "leaves, with {a} tokens",
    Noted.NO_PAGES: "waits for pages: needs {a} and room to grow, {b} are to be had",
}


def step_size(num_rows: int, num_tokens: int) -> int:
    """Rows and tokens of a step in one number; a batch has 4,095 rows at most here."""
    return min(num_rows, 0xFFF) << 20 | min(num_tokens, 0xF_FFFF)


def text_of(note: Note) -> str:
    """One note in words; of a later release's kind, its numbers."""
    try:
        kind = Noted(note.kind)
    except ValueError:
        return f"note {note.kind}: {note.a}, {note.b}"
    match kind:
        case Noted.ADMITTED:
            where = "to be prefilled elsewhere" if note.b else "enters a batch"
            return f"{where}; {note.a} tokens are cached"
        case Noted.PULLED:
            return f"{note.a} pages are here{', all of them' if note.b else ''}"
        case _:
            return _TEXTS[kind].format(a=note.a, b=note.b, end=note.a + note.b)
