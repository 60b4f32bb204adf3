"""What actors note of requests in their trace rings (`mesh/runtime/trace_ring.py`), and how it reads.

Per request some twenty notes in all actors together, and two for each step; none for a token that comes as it should.
"""

import enum
from collections.abc import Callable
from typing import Final

from kvstore.transfer.failures import TRANSFER_FAILURES
from mesh.runtime.trace_ring import Note, key_of

Noting = Callable[[int, str, int, int], None]
"""Kind, request id, and two numbers: `TraceRing.note`, as cores call it."""


class Noted(enum.IntEnum):
    """Of a request; `a` and `b` as below. Numbers are in files that a later release may read: they never change."""

    # Schedulers.
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
    FOUND = 11  # pages that its host's disk has, pages that were cached before them
    RESTORING = 12  # pages that are read from the disk, the first one's place
    RESTORED = 13  # pages that came, and how many should have
    DEARER = 14  # pages that are computed, as that is quicker than reading any

    # Workers. A row that decodes is in no note: the steps between these are its steps.
    KNOWN = 20  # step, tokens of its prompt: its sequence is opened
    COMPUTING = 21  # first position, tokens: a chunk of its prompt is in a step that begins
    COMPUTED = 22  # step, microseconds: that step ended

    # KV agents.
    LENT = 40  # pages that may be written
    COPYING = 41  # pages, and how many there are in all: a copy begins
    COPIED = 42  # bytes, the transport's key: a copy ended, well or not
    COMPLETE = 43  # pages, all of them
    FAILED = 44  # pages that had come, the code's key

    # Detokenizers.
    OPENED = 60  # attempt, output tokens that had been delivered before
    FIRST_TEXT = 61  # position, tokens that came without any text before it
    HELD = 62  # position that ended it, tokens without text before that
    GAP = 63  # position from which tokens are asked for again
    SAID = 64  # output tokens, the finish reason's key

    # Gateways.
    PREPARING = 80  # prompts that a tokenizer is asked for
    PREPARED = 81  # tokens, microseconds by the tokenizer's clock
    SUBMITTED = 82  # attempt, tokens: the ask leaves
    ANSWERED = 83  # attempt, 1 if the scheduler has it
    ROUTING = 84  # attempt: a tokenizer is asked for another place
    ROUTED = 85  # attempt, 1 if there is one
    WRITTEN = 86  # the first chunk of a stream is written
    LAGS = 87  # the client does not take what is written
    KEEPS_UP = 88  # milliseconds that it lagged, 1 if it left
    FIRST = 89  # tokens: the first output of a sample is here


STEP: Final = 1
"""A step was acknowledged: `key` is its number, `a` its rows in the upper 12 bits and its tokens, `b` µs it took."""
BEGAN: Final = 2
"""A worker begins a step: `key` and `a` as above, `b` µs that it lay at the worker."""
COMPUTED_STEP: Final = 3
"""A worker's step ended: `key` and `a` as above, `b` µs that it took."""
MIN_HELD: Final = 4
"""Tokens without text before that is noted: a character of Chinese takes up to three, a mark of a chat one."""

_TRANSPORTS: Final = ("shm", "cuda_ipc", "tcp", "nccl", "disk")
_FINISHES: Final = ("stop", "length")
_NAMES: Final = {key_of(name): name for name in (*_TRANSPORTS, *TRANSFER_FAILURES, *_FINISHES)}
_TEXTS: Final = {
    Noted.ARRIVED: "attempt {a} arrives, {b} tokens",
    Noted.ORDERED: "its prefill is ordered (attempt {a}), {b} tokens",
    Noted.GRANTED: "{a} pages are granted, the prefill is ordered",
    Noted.CHUNK: "a chunk leaves in a step: tokens {a} to {end}",
    Noted.FOUND: "the disk has {a} more pages than the {b} that are cached",
    Noted.RESTORING: "{a} pages begin to be read from the disk, from page {b} on",
    Noted.RESTORED: "{a} of {b} pages are read from the disk",
    Noted.DEARER: "{a} pages are computed, whether the disk has them or not: reading takes longer",
    Noted.PREFILLED: "prefilled; {a} tokens were cached there",
    Noted.PUT_BACK: "put back, with {a} tokens",
    Noted.LEFT: "leaves, with {a} tokens",
    Noted.KNOWN: "opened in step {a}, {b} prompt tokens",
    Noted.COMPUTING: "tokens {a} to {end} begin to be computed",
    Noted.COMPUTED: "step {a} has computed them in {ms:.1f} ms",
    Noted.LENT: "{a} pages may be written",
    Noted.COPYING: "a copy of {a} pages of {b} begins",
    Noted.COPIED: "the copy ends: {a} bytes over {name}",
    Noted.COMPLETE: "all {a} pages are in",
    Noted.FAILED: "the transfer failed ({name}), {a} pages are in",
    Noted.OPENED: "the stream of attempt {a} opens after {b} output tokens",
    Noted.FIRST_TEXT: "its first text is that of token {a} ({b} before it had none)",
    Noted.HELD: "token {a} brings text again, after {b} without: half a character, a possible stop string, or no text",
    Noted.GAP: "tokens from {a} on are missing and asked for",
    Noted.SAID: "the text ends after {a} tokens: {name}",
    Noted.PREPARING: "a tokenizer is asked (prompts: {a})",
    Noted.PREPARED: "the tokenizer answered: {a} tokens in {ms:.1f} ms of its own",
    Noted.SUBMITTED: "attempt {a} is submitted, {b} tokens",
    Noted.ROUTING: "another place is looked for (attempt {a})",
    Noted.WRITTEN: "the first chunk is written",
    Noted.FIRST: "its first output is here: tokens {a}",
    Noted.LAGS: "the client does not keep up",
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
        case Noted.ANSWERED:
            return f"attempt {note.a} is {'taken' if note.b else 'not taken'}"
        case Noted.ROUTED:
            return f"attempt {note.a} {'has a place' if note.b else 'finds no place'}"
        case Noted.KEEPS_UP:
            return f"the client {'left' if note.b else 'takes more'} after {note.a} ms"
        case _:
            # What an installed transport calls itself or its errors, nobody here knows.
            name = _NAMES.get(note.b, f"name {note.b:08x}")
            return _TEXTS[kind].format(a=note.a, b=note.b, end=note.a + note.b, ms=note.b / 1000, name=name)


def unheard(kind: int, what: str | int, a: int, b: int) -> None:
    """Until an actor says where to, and in tests of a core: nothing depends on what is noted."""
