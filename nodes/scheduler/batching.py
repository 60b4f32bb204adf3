"""What goes into a step: one row per decoding sequence first, then chunks of prompts, within the step's token budget.

Decode rows come first, so a long prompt never holds up those who run; `max_running` is below the budget by at least a
page, so decode rows never shut prompts out. A chunk that is not a prompt's last ends on a page boundary, because only
full pages are shared and sent on. Rows carry all their page ids: a worker remembers nothing between steps.
Pure; called by the core once per step, so it is written for speed.
"""

from array import array
from collections.abc import Iterable

from nodes.protocol import StepRow
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.pipeline import Step
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.step_pace import StepPace


def compose_step(
    config: SchedulerConfig,
    step_tokens: int,
    pace: StepPace,
    decoding: Iterable[Sequence],
    prefilling: Iterable[Sequence],
) -> Step | None:
    """The next step, or None if there is nothing to compute. Sequences in it count as scheduled from now on.

    `pace` says how many prompt tokens the decoding rows have time for.
    Decoding sequences that have all the tokens they may have, or no page for the next one, are left out.
    """
    step = Step([], [], array("i"), array("i"))
    num_rows = _add_decode_rows(step, decoding, step_tokens)
    room = step_tokens - num_rows
    if prefilling and (paced := pace.prompt_tokens(num_rows)) is not None:
        room = min(room, paced)
    for sequence in prefilling:
        budget = min(room, config.chunk_tokens)
        if budget <= 0:
            break
        size = _chunk_size(sequence, budget, config.page_size)
        if size:
            _add_chunk(step, sequence, size)
            room -= size
    return step if step.rows else None


def _add_decode_rows(step: Step, decoding: Iterable[Sequence], step_tokens: int) -> int:
    rows, sequences, token_ids, page_ids = step
    num_rows = 0
    for sequence in decoding:
        start, length = sequence.num_scheduled, sequence.length
        if length >= sequence.max_length or start >= sequence.capacity:
            continue
        if num_rows == step_tokens:
            break
        pages = sequence.page_ids
        if start < len(sequence.token_ids):
            token_ids.append(sequence.token_ids[start])
            from_row = -1
        else:
            token_ids.append(-1)
            from_row = sequence.last_row
        page_ids.extend(pages)
        num_prompt, sampling = sequence.num_prompt_tokens, sequence.sampling
        rows.append(StepRow(sequence.row_id, start, 1, len(pages), num_prompt, sampling, from_row, sequence.request_id))
        sequences.append(sequence)
        sequence.last_row = num_rows
        sequence.num_scheduled = start + 1
        sequence.length = length + 1
        sequence.num_inflight += 1
        num_rows += 1
    return num_rows


def _chunk_size(sequence: Sequence, budget: int, page_size: int) -> int:
    left = sequence.num_unscheduled
    if left <= budget:
        return left
    return max(0, (sequence.num_scheduled + budget) // page_size * page_size - sequence.num_scheduled)


def _add_chunk(step: Step, sequence: Sequence, size: int) -> None:
    start = sequence.num_scheduled
    end = start + size
    is_last = end == sequence.length
    sampling = sequence.sampling if is_last else None
    step.token_ids.extend(sequence.token_ids[start:end])
    step.page_ids.extend(sequence.page_ids)
    sequence.last_row = len(step.rows)
    num_pages, num_prompt = len(sequence.page_ids), sequence.num_prompt_tokens
    step.rows.append(StepRow(sequence.row_id, start, size, num_pages, num_prompt, sampling, -1, sequence.request_id))
    step.sequences.append(sequence)
    sequence.num_scheduled = end
    sequence.num_inflight += 1
    if is_last:
        sequence.length += 1
