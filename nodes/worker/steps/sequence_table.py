"""What a worker knows of the sequences that it computes: the slot of each, its pages, the token that it drew last.

The table belongs to one incarnation of the worker and one scheduler epoch, and is empty at the beginning of either.
Everything is written by position: pages to their places, a drawn token to the position that it is for. Nothing
accumulates, so a step that is sent again leaves the same state as before.
For sequences whose draws look back it also holds all tokens. Pure; owned by the core.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add
from typing import TYPE_CHECKING, Final

from nodes.asks import DrawnModel, open_asks
from nodes.protocol.steps import LAST_SEQUENCE, MAX_SLOTS, Open
from nodes.request import TOKENS, VECTOR_KINDS, Sampling
from nodes.worker.steps.columns import Columns

if TYPE_CHECKING:
    from nodes.asks.edits import Editor, RowReads


class OpenSequence:
    """A sequence in a slot. `drawn` is its token for position `drawn_at` (-1: none yet); `pages` has no gaps.

    `tokens` are its tokens from position 0 on, if its draws look back; the array is replaced, never changed, since
    running rows refer to it. `num_known` is the last position at which its next row may begin. `editors` and `reads`:
    what its request changes about logits, and wants to know of probabilities; `problem`, if not empty, is why it cannot
    be drawn as it asks. `is_edited`: some of its logits may be changed; `is_plain`: it draws the most likely token of
    unchanged ones at every position, and nothing is read. `first_end` is the earliest end of a row that draws, for the
    quick check of whole steps; if its draws look back or its prompt is read, no row reaches it, so that its steps are
    checked row by row. `prompt_reads`: what is read of its prompt, whose tokens are `prompt_ids`. `kind`: whether it
    draws tokens, or makes a vector of its prompt, and how; `second_from` as in `RequestSpec`.
    """

    __slots__ = (
        "_carried", "drawn", "drawn_at", "editors", "first_end", "is_edited", "is_plain", "kind", "num_known",
        "num_prompt_tokens", "pages", "problem", "prompt_ids", "prompt_reads", "reads", "request_id", "sampling",
        "second_from", "sequence", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        opening: Open,
        editors: "Sequence[Editor]" = (),
        reads: "RowReads | None" = None,
        problem: str = "",
        prompt_reads: "RowReads | None" = None,
    ) -> None:
        self.sequence = opening.sequence
        self.num_prompt_tokens = opening.num_prompt_tokens
        self.sampling = sampling = opening.sampling
        self.editors, self.reads, self.problem = editors, reads, problem
        self.is_edited = bool(editors or problem)
        self.is_plain = sampling.is_greedy and not self.is_edited and reads is None
        self.request_id, self.second_from = opening.request_id, opening.second_from
        self.pages = array("i")
        self.drawn_at = self.drawn = -1
        self.tokens: array[int] | None = None
        self.num_known, self.first_end = LAST_SEQUENCE, opening.num_prompt_tokens
        if sampling.looks_back:
            self.tokens = array("i", opening.token_ids)
            self.num_known, self.first_end = len(self.tokens), LAST_SEQUENCE
        self.prompt_reads, self.prompt_ids = prompt_reads, array("i")
        if prompt_reads is not None:
            self.prompt_ids = array("i", opening.token_ids[: opening.num_prompt_tokens])
            self.first_end = LAST_SEQUENCE
        self.kind, self.second_from = opening.kind, opening.second_from
        # By position: what a row that begins there pools with. Of the first position on there is nothing yet.
        self._carried = {opening.num_pooled: opening.pooled, 0: b""}

    def carried_to(self, position: int) -> bytes | None:
        """What was pooled of the positions before `position`, for a row that begins there; None: it is not known."""
        return b"" if self.kind == "last" else self._carried.get(position)

    def carry(self, start: int, before: bytes, end: int, after: bytes) -> None:
        """A row from `start` to `end` has pooled: `before` as it began, `after` now."""
        # The row's own beginning is kept, too: its step may be run again, row by row or because its result was lost.
        self._carried = {start: before, end: after}

    def write(self, start: int, token_ids: "array[int]") -> "array[int] | None":
        """Note a row's tokens, from position `start` on. Returns all tokens up to its end, if they are kept."""
        if self.tokens is None:
            return None
        end = start + len(token_ids)
        # A new array: rows that are running or queued in the other thread refer to the old one.
        self.tokens = self.tokens[:start] + token_ids + self.tokens[end:]
        self.num_known = len(self.tokens)
        return self.tokens[:end]


_NOBODY: Final = OpenSequence(Open(0, -1, 0, Sampling()))


class SequenceTable:
    """Open sequences by slot."""

    def __init__(self, model: DrawnModel) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        self._slots: dict[int, OpenSequence] = {}
        # The last result of a look-up, its table and its slots: these lists and dictionaries are never changed.
        self._found: list[OpenSequence] = []
        self._found_in, self._found_for = self._slots, list[int]()

    def looks_back(self, opens: Sequence[Open], slots: Iterable[int]) -> bool:
        """Whether a draw in one of these slots, once `opens` have been opened, depends on the tokens before it."""
        opened = {one.slot: one.sampling.looks_back for one in opens}
        return any(opened.get(slot, self._slots.get(slot, _NOBODY).tokens is not None) for slot in slots)

    def apply(self, opens: Sequence[Open], columns: Columns) -> list[OpenSequence] | str:
        """Open the sequences in `opens` and put pages in their places. Returns the sequence of each row.

        If that is impossible, returns why, in words, and changes nothing.
        """
        slots = self._slots
        if opens:
            for one in opens:
                if not (
                    0 <= one.slot < MAX_SLOTS and 0 <= one.sequence <= LAST_SEQUENCE and one.num_prompt_tokens >= 0
                ):
                    return (
                        f"sequence {one.sequence} ({one.num_prompt_tokens} prompt tokens) cannot have slot {one.slot}"
                    )
                if one.sampling.reads_prompt and len(one.token_ids) < one.num_prompt_tokens:
                    return f"the prompt of sequence {one.sequence} is to be read, but not all of its tokens are given"
            # In a copy: a step that is refused below must leave the table as it was.
            slots = slots | {one.slot: self._opened(one) for one in opens}
        # The same list object means the slots of the step before, and the same table that nothing was opened since.
        # `_NOBODY` for a free slot: no sequence has its number, so the row is refused without another check.
        is_same = self._found_in is slots and self._found_for is columns.slots
        found = self._found if is_same else list(map(slots.get, columns.slots, repeat(_NOBODY)))
        if not is_same or columns.first_pages != [len(one.pages) for one in found]:
            if problem := _mismatch(found, columns):
                return problem
            # If draws look back, more than pages must be checked, so the result is not kept for the next step.
            is_kept = not [one for one in found if one.tokens is not None]
            self._found, self._found_in, self._found_for = found, slots, columns.slots if is_kept else []
        # Only once all rows are known to be valid, so that a refused step leaves nothing behind.
        self._slots = slots
        if columns.page_ids:
            begin = 0
            for one, first, count in zip(found, columns.first_pages, columns.num_pages, strict=True):
                if count:
                    one.pages[first : first + count] = columns.page_ids[begin : begin + count]
                    begin += count
        return found

    def record(self, columns: Columns, token_ids: Sequence[int]) -> None:
        """A step drew `token_ids`, by row (-1: nothing). Its slots may have other sequences by now."""
        slots, ends = self._slots, map(add, columns.starts, columns.counts)
        if self._found_in is slots and self._found_for is columns.slots:
            # No sequence was opened since the step began.
            for one, end, token_id in zip(self._found, ends, token_ids, strict=False):
                if token_id >= 0:
                    one.drawn, one.drawn_at = token_id, end
            return
        for slot, sequence, end, token_id in zip(columns.slots, columns.sequences, ends, token_ids, strict=False):
            if token_id >= 0 and (one := slots.get(slot, _NOBODY)).sequence == sequence:
                one.drawn, one.drawn_at = token_id, end

    def _opened(self, opening: Open) -> OpenSequence:
        one = OpenSequence(opening, *open_asks(opening.sampling.asks, self._model))
        if one.kind != TOKENS and (one.kind not in VECTOR_KINDS or not (self._model.spec and self._model.spec.pooling)):
            one.problem = f"this worker makes no vectors of kind {one.kind!r}"
        if one.kind == TOKENS and self._model.spec and not self._model.spec.has_head:
            one.problem = "this worker's model has no head, and draws no tokens"
            one.is_edited, one.is_plain = True, False
        before = self._slots.get(opening.slot, _NOBODY)
        if before.sequence == one.sequence:
            # Opened again for a step that is sent again, whose input may be the token drawn before.
            one.drawn, one.drawn_at = before.drawn, before.drawn_at
        return one


def _mismatch(found: list[OpenSequence], columns: Columns) -> str:
    """Why the rows of `columns` cannot be rows of these sequences, in words; empty if they can."""
    rows = zip(found, columns.slots, columns.sequences, columns.starts, columns.first_pages, strict=True)
    for one, slot, sequence, start, first in rows:
        # A slot alone proves nothing: in a step that was lost, its sequence may have ended and another been opened.
        if one.sequence != sequence:
            return f"sequence {sequence} is not open in slot {slot}"
        # A gap means that a step with pages was lost: the scheduler sends everything again (`StepMismatch`).
        if first > len(one.pages):
            return f"sequence {sequence} has {len(one.pages)} pages, but is given pages from number {first} on"
        if start > one.num_known:
            return f"{one.num_known} tokens of sequence {sequence} are known, but a row begins at {start}"
    return ""
