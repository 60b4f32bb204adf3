"""What goes into a step: one row per decoding sequence first, then chunks of prompts, within the step's token budget.

Decode rows come first, so a long prompt never holds up those who run; `max_running` is below the budget by at least a
page, so decode rows never shut prompts out. A chunk that is not a prompt's last ends on a page boundary, because only
full pages are shared and sent on. Rows carry the pages that are new to the worker, and a sequence's first row in the
worker's table what it needs to know of it.
Pure; called by the core once per step, so it is written for speed.
"""

import struct
from array import array
from collections.abc import Iterable

from nodes.scheduler.batch.step import Step
from nodes.scheduler.batch.step_pace import StepPace
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence


def compose_step(
    config: SchedulerConfig,
    step_tokens: int,
    pace: StepPace,
    decoding: Iterable[Sequence],
    prefilling: Iterable[Sequence],
    table: int,
) -> Step | None:
    """The next step for the worker's `table`, or None if there is nothing to compute.

    Sequences in it count as scheduled from now on, and as opened in the table. `pace` says how many prompt tokens the
    decoding rows have time for. Decoding sequences that have all the tokens they may have, or no page for the next
    one, are left out.
    """
    # A list takes a row in a third of the time that an array does.
    rows: list[int] = []
    step = Step(array("i"), [], array("i"), array("i"), [])
    num_rows = _add_decode_rows(step, rows, decoding, step_tokens, table)
    room = step_tokens - num_rows
    if prefilling and (paced := pace.prompt_tokens(num_rows)) is not None:
        room = min(room, paced)
    for sequence in prefilling:
        budget = min(room, config.chunk_tokens)
        if budget <= 0:
            break
        size = _chunk_size(sequence, budget, config.page_size)
        if size:
            _add_chunk(step, rows, sequence, size, table)
            room -= size
    # As C packs it: an array makes numbers of a list one by one, which takes twice as long.
    step.rows.frombytes(struct.pack(f"={len(rows)}i", *rows))
    return step if rows else None


def _add_decode_rows(step: Step, rows: list[int], decoding: Iterable[Sequence], step_tokens: int, table: int) -> int:
    sequences, tokens = step.sequences, list[int]()
    add_sequence, add_token = sequences.append, tokens.append
    for sequence in decoding:
        start, length = sequence.num_scheduled, sequence.length
        # Written out here, not behind a property: this loop runs for every row of every step.
        if length >= sequence.max_length or start >= sequence.capacity:
            continue
        if len(sequences) == step_tokens:
            break
        known = sequence.token_ids
        # -1: drawn by the step in flight. The worker fills it in, so that no step waits for a result to come here
        # first.
        add_token(known[start] if start < len(known) else -1)
        # Fifteen steps of sixteen add no page (pages of 16 tokens), so the call is kept for those that do.
        first, num_pages = sequence.num_placed, 0
        if sequence.table != table or first != len(sequence.page_ids):
            first, num_pages = _place(step, sequence, table)
        rows += sequence.slot, sequence.number, start, 1, 1, first, num_pages
        add_sequence(sequence)
        sequence.num_scheduled = start + 1
        # Counted as if its token were drawn already: the next step may then be composed before this one's result is
        # here.
        sequence.length = length + 1
        sequence.num_inflight += 1
    step.token_ids.fromlist(tokens)
    return len(sequences)


def _place(step: Step, sequence: Sequence, table: int) -> tuple[int, int]:
    """Add what the worker's table lacks of a sequence. Returns the first of the pages, and their number."""
    if sequence.table != table:
        step.opens.append(sequence.opening())
        sequence.table, sequence.num_placed = table, 0
    first, sequence.num_placed = sequence.num_placed, len(sequence.page_ids)
    step.page_ids.extend(sequence.page_ids[first:])
    return first, sequence.num_placed - first


def _chunk_size(sequence: Sequence, budget: int, page_size: int) -> int:
    left = sequence.num_unscheduled
    # A prompt's end need not be a page's: what is drawn after it goes on in the same page.
    if left <= budget:
        return left
    # 0 where the room does not reach the next page boundary: a chunk that ends inside a page could be shared with
    # nobody.
    return max(0, (sequence.num_scheduled + budget) // page_size * page_size - sequence.num_scheduled)


def _add_chunk(step: Step, rows: list[int], sequence: Sequence, size: int, table: int) -> None:
    start = sequence.num_scheduled
    end = start + size
    is_last = end == sequence.length
    step.token_ids.extend(sequence.token_ids[start:end])
    first, num_pages = _place(step, sequence, table)
    rows += (sequence.slot, sequence.number, start, size, int(is_last), first, num_pages)
    step.sequences.append(sequence)
    sequence.num_scheduled = end
    sequence.num_inflight += 1
    # The last chunk draws a token, which the next step may already name as its input.
    if is_last:
        sequence.length += 1
