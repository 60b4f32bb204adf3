"""What a worker notes of its steps: each with its line and its time, and which prompts' chunks are in it.

Rows that decode are in no note of their own: at 256 of them that were 140 µs of each step.
"""

from collections.abc import Sequence

from mesh.runtime.trace_ring import MAX_NUMBER, TraceRing
from nodes.protocol.steps import Open
from nodes.trace_notes import BEGAN, COMPUTED_STEP, Noted, step_size
from nodes.worker.steps.step import RunnableStep


def note_begin(ring: TraceRing, step: RunnableStep, opens: Sequence[Open], waited_s: float) -> None:
    """A step begins, `waited_s` after it came; `opens` came with it."""
    num_tokens = step.num_tokens
    ring.step(BEGAN, step.step, step_size(len(step.rows), num_tokens), _microseconds(waited_s))
    for opening in opens:
        ring.note(Noted.KNOWN, opening.request_id, step.step, opening.num_prompt_tokens)
    for request_id, start, count in _chunks(step, num_tokens):
        ring.note(Noted.COMPUTING, request_id, start, count)


def note_end(ring: TraceRing, step: RunnableStep, took_s: float) -> None:
    """It ended, `took_s` after the one before it, or after its beginning if that was later."""
    took_us, num_tokens = _microseconds(took_s), step.num_tokens
    ring.step(COMPUTED_STEP, step.step, step_size(len(step.rows), num_tokens), took_us)
    for request_id, *_ in _chunks(step, num_tokens):
        ring.note(Noted.COMPUTED, request_id, step.step, took_us)


def _chunks(step: RunnableStep, num_tokens: int) -> list[tuple[str, int, int]]:
    """Request id, first position and number of tokens of the rows that have more than one."""
    rows = step.rows
    if num_tokens == len(rows):
        # Nearly all steps: a look at 256 rows, twice, takes 20 µs.
        return []
    columns = zip(rows.found, rows.starts, rows.counts, strict=True)
    return [(sequence.request_id, start, count) for sequence, start, count in columns if count > 1]


def _microseconds(took_s: float) -> int:
    return min(int(took_s * 1e6), MAX_NUMBER)
