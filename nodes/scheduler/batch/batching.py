"""What goes into a step: one row per decoding sequence first, then chunks of prompts, within the step's token budget.

Decode rows come first, so a long prompt never holds up running sequences; `max_running` is below the budget by at least
a page, so decode rows never shut prompts out. A chunk that is not a prompt's last ends on a page boundary, because only
full pages are shared and sent on. Rows carry the pages that are new to the worker; a sequence's first row in the
worker's table comes with an `Open`.
Pure; called by the core once per step, so it is written for speed.
"""

import struct
from array import array
from collections.abc import Iterable
from typing import Final

from nodes.protocol.steps import ROW_WIDTH, RowColumn
from nodes.scheduler.batch.step import Step
from nodes.scheduler.batch.step_pace import StepPace
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence

_START, _COUNT, _DRAWS, _FIRST_PAGE, _NUM_PAGES = (
    slice(column, None, ROW_WIDTH)
    for column in (RowColumn.START, RowColumn.COUNT, RowColumn.DRAWS, RowColumn.FIRST_PAGE, RowColumn.NUM_PAGES)
)
_FEW: Final = 32
"""Fewer numbers than this are put into an array faster than packed."""


def compose_step(
    config: SchedulerConfig,
    step_tokens: int,
    pace: StepPace,
    decoding: Iterable[Sequence],
    prefilling: Iterable[Sequence],
    table: int,
    before: Step | None = None,
) -> Step | None:
    """The next step for the worker's `table`, or None if there is nothing to compute.

    Sequences in it count as scheduled from now on, and as opened in the table. `pace` says how many prompt tokens the
    decoding rows have time for. Decoding sequences that have all the tokens they may have, or no page for the next
    one, are left out. `before` is the step composed last: an unchanged batch reuses its rows, each a position further.
    """
    step = _decode_step(decoding, step_tokens, table, before)
    num_rows = len(step.sequences)
    room = step_tokens - num_rows
    if prefilling and (paced := pace.prompt_tokens(num_rows)) is not None:
        room = min(room, paced)
    for sequence in prefilling:
        budget = min(room, config.chunk_tokens)
        if budget <= 0:
            break
        size = _chunk_size(sequence, budget, config.page_size)
        if config.is_encoder and size < sequence.num_unscheduled:
            # It waits for a step with room for all of it. The first that waits has the next step's.
            continue
        if size:
            _add_chunk(step, sequence, size, table)
            room -= size
    return step if step.sequences else None


def _decode_step(decoding: Iterable[Sequence], step_tokens: int, table: int, before: Step | None) -> Step:
    # One list after the other: 256 rows take 50 us like this, and 75 in a single loop.
    ready = [one for one in decoding if one.length < one.max_length and one.num_scheduled < one.capacity]
    if not ready:
        return Step(array("i"), [], array("i"), array("i"), [])
    if len(ready) > step_tokens:
        del ready[step_tokens:]
    starts = [one.num_scheduled for one in ready]
    # -1: drawn by the step in flight. The worker fills it in, so that no step waits for a result to come here first.
    rows = zip(ready, starts, strict=True)
    tokens = [one.token_ids[start] if start < len(one.token_ids) else -1 for one, start in rows]
    with_news = [index for index, one in enumerate(ready) if one.num_placed != len(one.page_ids) or one.table != table]
    step = Step(_decode_rows(ready, table, with_news, before), ready, _packed(tokens), array("i"), [])
    step.rows[_START] = _packed(starts)
    # Fifteen steps of sixteen add no page to a row (pages of 16 tokens), so only the others make the call.
    for index in with_news:
        first = index * ROW_WIDTH + RowColumn.FIRST_PAGE
        step.rows[first : first + 2] = array("i", _place(step, ready[index], table))
    for one in ready:
        one.num_scheduled += 1
        # Counted as if its token were drawn already: the next step may be composed before this one's result is here.
        one.length += 1
        one.num_inflight += 1
    return step


def _decode_rows(sequences: list[Sequence], table: int, with_news: list[int], before: Step | None) -> "array[int]":
    """The rows of `sequences`, without any new page; the caller fills in their starts."""
    # Slots need not be compared: a sequence that changed its slot has lost its pages meanwhile, and is opened anew.
    if (
        before is not None
        and before.sequences == sequences
        and len(before.token_ids) == len(sequences)
        and before.rows[_DRAWS] == before.rows[_COUNT]
        and not (with_news and [index for index in with_news if sequences[index].table != table])
    ):
        rows = before.rows[:]
        if before.page_ids:
            rows[_FIRST_PAGE] = _packed([sequence.num_placed for sequence in sequences])
            rows[_NUM_PAGES] = array("i", bytes(4 * len(sequences)))
        return rows
    # A list takes a row in a third of the time that an array does.
    numbers: list[int] = []
    for sequence in sequences:
        numbers += sequence.slot, sequence.number, 0, 1, 1, sequence.num_placed, 0
    return _packed(numbers)


def _packed(numbers: list[int]) -> "array[int]":
    if len(numbers) < _FEW:
        return array("i", numbers)
    # Packed in C: an array converts a list's numbers one by one, which takes twice as long.
    packed = array("i")
    packed.frombytes(struct.pack(f"={len(numbers)}i", *numbers))
    return packed


def _place(step: Step, sequence: Sequence, table: int) -> tuple[int, int]:
    """Add what the worker's table lacks of a sequence. Returns the index of its first new page, and their number."""
    if sequence.table != table:
        step.opens.append(sequence.opening())
        sequence.table, sequence.num_placed = table, 0
    first, sequence.num_placed = sequence.num_placed, len(sequence.page_ids)
    step.page_ids.extend(sequence.page_ids[first:])
    return first, sequence.num_placed - first


def _chunk_size(sequence: Sequence, budget: int, page_size: int) -> int:
    left = sequence.num_unscheduled
    # A prompt need not end with a page: its output goes on in the same page.
    if left <= budget:
        return left
    # 0 if the budget does not reach the next page boundary: a page that a chunk fills in part could not be shared.
    return max(0, (sequence.num_scheduled + budget) // page_size * page_size - sequence.num_scheduled)


def _add_chunk(step: Step, sequence: Sequence, size: int, table: int) -> None:
    start = sequence.num_scheduled
    end = start + size
    draws = end == sequence.length and not sequence.is_vector
    step.token_ids.extend(sequence.token_ids[start:end])
    first, num_pages = _place(step, sequence, table)
    step.rows.extend((sequence.slot, sequence.number, start, size, int(draws), first, num_pages))
    step.sequences.append(sequence)
    sequence.num_scheduled = end
    sequence.num_inflight += 1
    # The last chunk draws a token, which the next step may already name as its input.
    if draws:
        sequence.length += 1
