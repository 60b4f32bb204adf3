"""Finds the rows of a step that can be run, once its pages are in the table, in the form that runners take.

Used by the core for every row of every step, so it is written for speed.
"""

from array import array
from collections.abc import Mapping
from itertools import accumulate
from operator import add
from typing import Final, NamedTuple

from nodes.protocol import RowError
from nodes.protocol.attempts import UNSUPPORTED_ASK
from nodes.request import TOKENS
from nodes.worker.steps.columns import Columns, Limits
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import MISSING_INPUT, NO_ROWS, Rows

BAD_ROW: Final = "bad_row"
_UNKNOWN: Final = b"\xff\xff\xff\xff"
"""The token -1."""

Draws = Mapping[int, tuple[int, int, int]]
"""What a step draws, by slot: for which sequence, in which row of its plan, and the position of the token."""


class CheckedRows(NamedTuple):
    """The rows that can be run, with the pages that they refer to, and why the others cannot."""

    rows: Rows
    page_ids: "array[int]"
    errors: list[RowError]


def check_rows(limits: Limits, columns: Columns, found: list[OpenSequence], ahead: Draws) -> CheckedRows:
    """Fill drawn tokens into `columns.token_ids`, and check each row; row i belongs to the sequence `found[i]`.

    `ahead`: what the running step, if there is one, will draw.
    """
    if not found:
        return CheckedRows(NO_ROWS, array("i"), [])
    if (checked := _check_whole(limits, columns, found)) is not None:
        return checked
    token_ids = columns.token_ids
    num_rows = len(found)
    sources, page_offsets, kept = [-1] * num_rows, [0] * num_rows, list[int]()
    histories: list[array[int] | None] = [None] * num_rows
    pages: list[array[int]] = []
    errors: list[RowError] = []
    page_size, vocab_size, context_length = limits.page_size, limits.vocab_size, limits.context_length
    # One check of all tokens: if all inputs are known, as in most steps, the tokens of single rows need no check.
    are_known = min(token_ids, default=0) >= 0 and max(token_ids, default=0) < vocab_size
    row, token_end, page_offset = -1, 0, 0
    rows = zip(found, columns.starts, columns.counts, columns.draws, strict=True)
    for one, start, count, is_drawn in rows:
        # By hand: `enumerate` makes another tuple for each row.
        row += 1
        first, token_end, end = token_end, token_end + count, start + count
        num_pages, source = (end + page_size - 1) // page_size, -1
        held = one.pages
        num_held = len(held)
        # One condition for three faults, which are told apart only if one has occurred: nearly all rows have none.
        if end > context_length or num_pages > num_held or (is_drawn and end < one.num_prompt_tokens):
            errors.append(RowError(row, BAD_ROW, _misplaced(limits, one, start, end)))
            continue
        # Whoever plans otherwise must not get a token drawn, nor states pooled that belong to no prompt.
        if one.kind != TOKENS and (one.problem or is_drawn or end > one.num_prompt_tokens):
            why = one.problem or "a sequence that makes a vector has only its prompt, and draws nothing"
            errors.append(RowError(row, UNSUPPORTED_ASK if one.problem else BAD_ROW, why))
            continue
        if not are_known:
            if count == 1 and token_ids[first] == -1:
                # By position, not "the last token": a step that is sent again then finds what it found the first time.
                if one.drawn_at == start:
                    token_ids[first] = one.drawn
                elif (source := _source(ahead, columns.slots[row], one.sequence, start)) < 0:
                    why = f"the token of sequence {one.sequence} for position {start} is not known here"
                    errors.append(RowError(row, MISSING_INPUT, why))
                    continue
            elif min(own := token_ids[first:token_end]) < 0 or max(own) >= vocab_size:
                errors.append(RowError(row, BAD_ROW, f"a token id is not in 0..{vocab_size - 1}"))
                continue
        kept.append(row)
        sources[row], page_offsets[row] = source, page_offset
        if one.tokens is not None:
            histories[row] = one.write(start, token_ids[first:token_end])
        # No copy for a row that reads all its pages, as every decoding row does.
        pages.append(held if num_pages == num_held else held[:num_pages])
        page_offset += num_pages
    starts, counts, offsets = columns.starts, columns.counts, list(accumulate(columns.counts[:-1], initial=0))
    whole = Rows(found, starts, counts, offsets, page_offsets, columns.draws, sources, histories)
    return CheckedRows(whole.picked(kept) if errors else whole, array("i", b"".join(pages)), errors)


def _check_whole(limits: Limits, columns: Columns, found: list[OpenSequence]) -> CheckedRows | None:
    """The same, faster, if all rows can be run, all draw and all inputs are known; None: check each row.

    This only detects that something is wrong; `check_rows` says what. Python goes through a list of 256 numbers in
    5 us, and took 110 us for all of the checks above on 256 valid rows.
    """
    starts, counts, token_ids = columns.starts, columns.counts, columns.token_ids
    page_size, context_length, num_rows = limits.page_size, limits.context_length, len(found)
    ends = list(map(add, starts, counts))
    pages = [one.pages for one in found]
    held = list(map(len, pages))
    rows = zip(found, ends, held, strict=True)
    if not min(columns.draws) or [
        one for one, end, num in rows if not one.first_end <= end <= num * page_size or end > context_length
    ]:
        return None
    if len(token_ids) == num_rows and token_ids.tobytes() == _UNKNOWN * num_rows:
        # All rows decode, one step ahead of the scheduler: by far most steps.
        if [one.drawn_at for one in found] != starts:
            return None
        token_ids[:] = array("i", [one.drawn for one in found])
    elif not token_ids.tobytes()[3::4].isascii() or max(token_ids) >= limits.vocab_size:
        return None
    offsets = range(num_rows) if len(token_ids) == num_rows else list(accumulate(counts[:-1], initial=0))
    # All pages of a sequence, not only those that its row reads: they differ only if it was given more.
    page_offsets = list(accumulate(held[:-1], initial=0))
    page_ids = array("i")
    page_ids.frombytes(b"".join(pages))
    return CheckedRows(Rows(found, starts, counts, offsets, page_offsets), page_ids, [])


def _misplaced(limits: Limits, one: OpenSequence, start: int, end: int) -> str:
    if end > limits.context_length:
        return f"positions {start} to {end - 1} exceed the context of {limits.context_length}"
    if end > len(one.pages) * limits.page_size:
        return f"{len(one.pages)} pages do not hold {end} positions"
    return "a row draws a token before the prompt ends"


def _source(ahead: Draws, slot: int, sequence: int, position: int) -> int:
    """Which row of the running step draws the token for `position`; -1: none."""
    owner, row, drawn_at = ahead.get(slot, (-1, -1, -1))
    return row if (owner, drawn_at) == (sequence, position) else -1
