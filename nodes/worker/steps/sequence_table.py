"""What a worker knows of the sequences that it computes: who has which slot, its pages, the token that it drew last.

It belongs to one incarnation of the worker and one scheduler epoch, and is empty at the beginning of either. What is
written to it goes by position: pages to their places, a drawn token to the position that it is for. Nothing is added
up, so a step that is sent again leaves what it left before. Rows are in columns, for a whole step at a time.
Of sequences whose sampling looks back it has all tokens besides. Pure; owned by the core.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from nodes.protocol.steps import LAST_SEQUENCE, MAX_SLOTS, Open
from nodes.request import Sampling
from nodes.worker.steps.columns import Columns, Int32s, Numbers, runs
from nodes.worker.steps.step import RunnableRow, rows_from

_NOBODY: Final = -1
_FIRST_SLOTS: Final = 16
_FIRST_WIDTH: Final = 8
_NO_SAMPLING: Final = Sampling()


class Draws(NamedTuple):
    """Rows of a step that draw: row `rows[i]` of the plan the token at `positions[i]` of `sequences[i]`."""

    rows: Numbers
    slots: Numbers
    sequences: Numbers
    positions: Numbers


class SequenceTable:
    """See the module. All arrays go by slot; `_pages` is `[slots, width]`. They grow with what is opened."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is open."""
        self._owner: Numbers = np.full(_FIRST_SLOTS, _NOBODY, np.int64)
        self._num_prompt: Numbers = np.zeros(_FIRST_SLOTS, np.int64)
        self._num_pages: Numbers = np.zeros(_FIRST_SLOTS, np.int64)
        self._drawn_at: Numbers = np.full(_FIRST_SLOTS, -1, np.int64)
        self._drawn: Int32s = np.full(_FIRST_SLOTS, -1, np.int32)
        self._pages: Int32s = np.zeros((_FIRST_SLOTS, _FIRST_WIDTH), np.int32)
        self._sampling: list[Sampling] = [_NO_SAMPLING] * _FIRST_SLOTS
        self._request_ids: list[str] = [""] * _FIRST_SLOTS
        # By slot. Arrays are replaced, never changed: rows that run have views of them.
        self._histories: dict[int, Int32s] = {}

    def looks_back(self, opens: Sequence[Open], slots: Iterable[int]) -> bool:
        """Whether a draw in one of these slots, once `opens` have been opened, depends on the tokens before it."""
        opened = {one.slot: one.sampling.looks_back for one in opens}
        if not (self._histories or any(opened.values())):
            return False
        return any(opened.get(slot, slot in self._histories) for slot in slots)

    def apply(self, opens: Sequence[Open], columns: Columns) -> str:
        """Open what is opened and put pages in their places. Returns why that cannot be; nothing is changed then."""
        for one in opens:
            if not (0 <= one.slot < MAX_SLOTS and 0 <= one.sequence <= LAST_SEQUENCE and one.num_prompt_tokens >= 0):
                return f"sequence {one.sequence} of {one.num_prompt_tokens} prompt tokens cannot have slot {one.slot}"
        slots, firsts, counts = columns.slots, columns.first_pages, columns.num_pages
        lasts = firsts + counts
        if len(slots) or opens:
            num_slots = 1 + max([int(slots.max(initial=0)), *(one.slot for one in opens)])
            self._make_room(num_slots, int(lasts.max(initial=0)))
        owner, num_pages = self._owner, self._num_pages
        if opens:
            # In copies: a step that is refused below must leave the table as it was.
            owner, num_pages = owner.copy(), num_pages.copy()
            opened = [one.slot for one in opens]
            owner[opened] = [one.sequence for one in opens]
            num_pages[opened] = 0
        strangers = owner[slots] != columns.sequences
        if strangers.any():
            row = int(strangers.argmax())
            return f"sequence {columns.sequences[row]} is not open in slot {slots[row]}"
        gaps = firsts > num_pages[slots]
        if gaps.any():
            row = int(gaps.argmax())
            has, first = num_pages[slots[row]], firsts[row]
            return f"sequence {columns.sequences[row]} has {has} pages, and is given pages from number {first} on"
        if self._histories or any(one.sampling.looks_back for one in opens):
            known = {slot: len(tokens) for slot, tokens in self._histories.items()}
            known |= {one.slot: len(one.token_ids) if one.sampling.looks_back else LAST_SEQUENCE for one in opens}
            for slot, start in zip(slots.tolist(), columns.starts.tolist(), strict=True):
                if start > known.get(slot, LAST_SEQUENCE):
                    return f"of the sequence in slot {slot} {known[slot]} tokens are known, and a row begins at {start}"
        for one in opens:
            self._open(one)
        self._owner, self._num_pages = owner, num_pages
        if len(columns.page_ids):
            self._pages.ravel()[runs(slots * self._pages.shape[1] + firsts, counts)] = columns.page_ids
            self._num_pages[slots] = np.maximum(num_pages[slots], lasts)
        return ""

    def num_pages(self, columns: Columns) -> Numbers:
        """Pages that the sequence of each row has."""
        return self._num_pages[columns.slots]

    def num_prompt_tokens(self, columns: Columns) -> Numbers:
        """Prompt tokens of the sequence of each row."""
        return self._num_prompt[columns.slots]

    def fill_in(self, columns: Columns, offsets: Numbers, unknown: Numbers, ahead: Draws | None) -> Numbers:
        """Write what was drawn to `token_ids` at `offsets` of the rows `unknown`, whose token is -1.

        Returns for all rows which row of the step that is under way, and draws `ahead`, draws their token; -1: none.
        """
        slots, starts = columns.slots[unknown], columns.starts[unknown]
        sources: Numbers = np.full(len(columns.slots), -1, np.int64)
        known = self._drawn_at[slots] == starts
        columns.token_ids[offsets[unknown[known]]] = self._drawn[slots[known]]
        if ahead is not None and not known.all():
            rows, ends = (np.full(len(self._owner), -1, np.int64) for _ in range(2))
            ours = self._owner[ahead.slots] == ahead.sequences
            rows[ahead.slots[ours]], ends[ahead.slots[ours]] = ahead.rows[ours], ahead.positions[ours]
            sources[unknown] = np.where(~known & (ends[slots] == starts), rows[slots], -1)
        return sources

    def runnable(
        self, columns: Columns, offsets: Numbers, good: Numbers, sources: Numbers | None, num_pages: Numbers
    ) -> tuple[list[RunnableRow], "array[int]"]:
        """The rows `good` as runners take them, with the first `num_pages` pages of each, and all those pages."""
        if not len(good):
            return [], array("i")
        if len(good) == len(offsets):
            slots, counts = columns.slots, num_pages
            of_rows = (columns.starts, columns.counts, self._num_prompt[slots], offsets)
            draws = columns.draws
        else:
            slots, counts = columns.slots[good], num_pages[good]
            of_rows = (columns.starts[good], columns.counts[good], self._num_prompt[slots], offsets[good])
            draws = columns.draws[good]
        numbers = slots.tolist()
        samplings: list[Sampling | None] = list(map(self._sampling.__getitem__, numbers))
        if not draws.all():
            samplings = [one if draw else None for one, draw in zip(samplings, draws.tolist(), strict=True)]
        fields = zip(
            good.tolist(),
            *(column.tolist() for column in of_rows),
            (counts.cumsum() - counts).tolist(),
            counts.tolist(),
            samplings,
            repeat(-1) if sources is None else sources[good].tolist(),
            map(self._request_ids.__getitem__, numbers),
            self._look_back(columns, offsets, good) if self._histories else repeat(None),
            strict=False,
        )
        return rows_from(fields), self._pages_of(slots, counts)

    def _pages_of(self, slots: Numbers, counts: Numbers) -> "array[int]":
        """The first `counts` pages of each slot."""
        # Slices of bytes, joined: indices of all pages would be twice as large as the pages, and are paged in anew for
        # each step where they pass the 128 KiB from which memory is mapped.
        memory = self._pages.reshape(-1).data.cast("B")
        begins = slots * (4 * self._pages.shape[1])
        slices = map(slice, begins.tolist(), (begins + 4 * counts).tolist())
        return array("i", b"".join(map(memory.__getitem__, slices)))

    def draws(self, columns: Columns, good: Numbers) -> Draws:
        """What the rows `good` will draw."""
        rows = good[columns.draws[good] == 1]
        if len(rows) == len(columns.slots):
            return Draws(rows, columns.slots, columns.sequences, columns.ends)
        return Draws(rows, columns.slots[rows], columns.sequences[rows], columns.ends[rows])

    def record(self, draws: Draws, token_ids: Sequence[int]) -> None:
        """A step drew `token_ids`, by row of its plan (-1: nothing). Who has a slot by now may be somebody else."""
        drawn = np.array(token_ids, np.int32)[draws.rows]
        ours = (drawn >= 0) & (self._owner[draws.slots] == draws.sequences)
        slots = draws.slots[ours]
        self._drawn[slots] = drawn[ours]
        self._drawn_at[slots] = draws.positions[ours]

    def _look_back(self, columns: Columns, offsets: Numbers, good: Numbers) -> list[Int32s | None]:
        """Of each of the rows `good` all tokens up to its end, by position, or None."""
        found: list[Int32s | None] = []
        for row in good.tolist():
            slot, start, offset = int(columns.slots[row]), int(columns.starts[row]), int(offsets[row])
            before = self._histories.get(slot)
            if before is not None:
                end = start + int(columns.counts[row])
                own = columns.token_ids[offset : offset + end - start]
                self._histories[slot] = np.concatenate((before[:start], own, before[end:]))
                found.append(self._histories[slot][:end])
            else:
                found.append(None)
        return found

    def _open(self, one: Open) -> None:
        if one.sampling.looks_back:
            self._histories[one.slot] = np.array(one.token_ids, np.int32)
        else:
            self._histories.pop(one.slot, None)
        if self._owner[one.slot] != one.sequence:
            self._drawn_at[one.slot] = -1
        self._num_prompt[one.slot] = one.num_prompt_tokens
        self._sampling[one.slot] = one.sampling
        self._request_ids[one.slot] = one.request_id

    def _make_room(self, num_slots: int, width: int) -> None:
        more = _grown(len(self._owner), num_slots) - len(self._owner)
        wider = _grown(self._pages.shape[1], width) - self._pages.shape[1]
        if more:
            self._owner = np.pad(self._owner, (0, more), constant_values=_NOBODY)
            self._num_prompt = np.pad(self._num_prompt, (0, more))
            self._num_pages = np.pad(self._num_pages, (0, more))
            self._drawn_at = np.pad(self._drawn_at, (0, more), constant_values=-1)
            self._drawn = np.pad(self._drawn, (0, more), constant_values=-1)
            self._sampling += [_NO_SAMPLING] * more
            self._request_ids += [""] * more
        if more or wider:
            self._pages = np.pad(self._pages, ((0, more), (0, wider)))


def _grown(size: int, wanted: int) -> int:
    """`size`, doubled until `wanted` fit."""
    while size < wanted:
        size *= 2
    return size
