"""Whether a step's result can be the answer to its plan. Pure; called by the pipeline for every result."""

from typing import Final

from nodes.protocol import StepResult
from nodes.protocol.steps import MAX_EXTRA_BYTES, MAX_VECTOR_BYTES, RowColumn
from nodes.scheduler.batch.step import Step

NOT_OURS: Final = "not_ours"
"""Of another worker, another incarnation of it, or for another scheduler epoch."""
NOT_SENT: Final = "not_sent"
"""For a step that was never sent."""
EARLY: Final = "early"
"""For a step whose predecessor has no result yet."""
REPEATED: Final = "repeated"
"""For a step that already has its result, as happens after a step was sent again."""
MALFORMED: Final = "malformed"
"""Cannot be an answer to the plan of its step."""
DISAGREED: Final = "disagreed"
"""Ranks of one group drew different tokens."""
REFUSALS: Final = (NOT_OURS, NOT_SENT, EARLY, REPEATED, MALFORMED, DISAGREED)

_LARGEST_ID: Final = 2**31 - 1
"""Sequences hold ids in 32 bits, whatever vocabulary a worker claims."""


def find_problem(step: Step, result: StepResult, vocab_size: int) -> str:
    """What is wrong, in words; empty if nothing is. A failed row may have any token. `vocab_size` 0: not known."""
    draws, token_ids = step.column(RowColumn.DRAWS), result.token_ids
    if len(token_ids) != len(draws):
        return f"step {result.step} has {len(draws)} rows and was answered with {len(token_ids)} tokens"
    failed = {error.row for error in result.errors}
    if failed and not 0 <= min(failed) <= max(failed) < len(draws):
        return f"step {result.step} has {len(draws)} rows and was answered with errors for rows {sorted(failed)}"
    if result.extras and (len(result.extras) != len(draws) or len(max(result.extras, key=len)) > MAX_EXTRA_BYTES):
        sizes = f"{len(result.extras)} values of up to {len(max(result.extras, key=len))} bytes"
        return f"step {result.step} has {len(draws)} rows and was answered with {sizes} beside its tokens"
    if problem := _problem_of_reads(step, result, failed):
        return problem
    # A row of a vector draws nothing.
    if (result.vectors or not min(draws, default=1)) and (problem := _problem_of_vectors(step, result, failed)):
        return problem
    end = min(vocab_size or _LARGEST_ID, _LARGEST_ID)
    if min(draws, default=0) and min(token_ids) >= 0 and max(token_ids) < end:
        # All rows draw, and all have drawn, as in decoding; checking row by row costs ten times as much.
        return ""
    for index, (draw, token_id) in enumerate(zip(draws, token_ids, strict=True)):
        if draw:
            if not 0 <= token_id < end and index not in failed:
                return f"row {index} of step {result.step} was answered with token {token_id}, not one of 0..{end - 1}"
        elif token_id != -1 and index not in failed:
            return f"row {index} of step {result.step} asked for no token and was answered with {token_id}"
    return ""


def _problem_of_vectors(step: Step, result: StepResult, failed: set[int]) -> str:
    """What is wrong with the vectors that rows made, in words."""
    found, making = result.vectors, [index for index, one in enumerate(step.sequences) if one.is_vector]
    if not (making or found):
        return ""
    starts, counts = step.column(RowColumn.START), step.column(RowColumn.COUNT)
    if found and len(found) != len(starts):
        return f"step {result.step} has {len(starts)} rows and was answered with vectors of {len(found)}"
    sizes = [len(one) for one in found] or [0] * len(starts)
    for index in making:
        one = step.sequences[index]
        # Sums, and the first state, go on from each row; of the last state nothing is known before its own row.
        is_due = starts[index] + counts[index] == one.num_prompt_tokens or one.spec.kind != "last"
        is_odd = sizes[index] % 4 or sizes[index] > MAX_VECTOR_BYTES or is_due != bool(sizes[index])
        if is_odd and index not in failed:
            return f"row {index} of step {result.step} makes a vector and was answered with {sizes[index]} bytes"
    if any(size and not one.is_vector for size, one in zip(sizes, step.sequences, strict=True)):
        return f"a row of step {result.step} that makes no vector was answered with one"
    return ""


def _problem_of_reads(step: Step, result: StepResult, failed: set[int]) -> str:
    """What is wrong with what rows read of their prompts, in words."""
    found = result.prompt_extras
    reading = [index for index, sequence in enumerate(step.sequences) if sequence.reading is not None]
    if not (reading or found):
        return ""
    starts, counts = step.column(RowColumn.START), step.column(RowColumn.COUNT)
    if found and len(found) != len(starts):
        return f"step {result.step} has {len(starts)} rows and was answered with what {len(found)} rows read"
    for index in reading:
        sequence = step.sequences[index]
        num = sequence.num_read_by(starts[index], counts[index])
        num_bytes = len(found[index]) if found else 0
        size, rest = divmod(num_bytes, num) if num else (0, num_bytes)
        known = 0 if sequence.reading is None else sequence.reading.size
        is_odd = rest or (num > 0 and not size) or size > MAX_EXTRA_BYTES or (known and num and size != known)
        if is_odd and index not in failed:
            return f"row {index} of step {result.step} reads {num} positions and was answered with {num_bytes} bytes"
    return ""
