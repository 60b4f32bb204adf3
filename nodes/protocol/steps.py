"""Between scheduler and worker: numbered steps and the taking over of a worker."""

import enum
from typing import Final

from mesh.wire.message import HotMessage, HotPart, Message
from nodes.request import Sampling


class RowColumn(enum.IntEnum):
    """Columns of a step's rows: where each number of a row is.

    `SLOT` and `SEQUENCE` say whose row it is, as opened. Its `COUNT` input tokens are at positions from `START` on,
    prompt and output counted together; the last `DRAWS` of them (0 or 1) draw a token, whose output position (the
    randomness counter) is `START + COUNT - num_prompt_tokens`. `NUM_PAGES` pages become pages number `FIRST_PAGE` and
    following of the sequence.
    """

    SLOT = 0
    SEQUENCE = 1
    START = 2
    COUNT = 3
    DRAWS = 4
    FIRST_PAGE = 5
    NUM_PAGES = 6


ROW_WIDTH: Final = len(RowColumn)
"""Numbers of a row."""
MAX_SLOTS: Final = 1 << 16
"""Slots of a worker's table."""
MAX_EXTRA_BYTES: Final = 4096
"""What may go beside one drawn token."""
LAST_SEQUENCE: Final = 2**31 - 1
"""A sequence's number fits 32 bits."""


class Open(HotPart, frozen=True):
    """Whoever had `slot` is forgotten, `sequence` has it now: a prompt of `num_prompt_tokens`, drawn from as said.

    It has no pages yet. `sequence` is the scheduler's number for it, `request_id` is for the worker's log. Where its
    sampling looks back (`repetition_penalty`), `token_ids` are those at positions 0 and following, up to its first row
    at least: pages hold what was computed of them, not which they are.
    """

    slot: int
    sequence: int
    num_prompt_tokens: int
    sampling: Sampling
    request_id: str = ""
    token_ids: list[int] = []


class StepPlan(HotMessage, frozen=True):
    """One forward pass. Buffers, little-endian int32: `rows[n, 7]` (see `RowColumn`), `token_ids` and `page_ids` of all
    rows, one row's after the other's.

    `opens` come before the rows. A token of -1, alone in its row, is what the sequence drew for that position in a step
    before, and not known to the scheduler yet. The pages of a row, with those that its sequence has, cover at least
    positions `0 .. START + COUNT`; those of a step are put in their places, not appended, so a step can be sent again
    as it is. A sequence has at most one row. Rows finish in order; the worker runs steps in order of `step`, refuses
    other epochs, and answers a step it has already done with the same result.
    A step that has not ended `timeout_s` (above 0) after the one before it hangs: the worker ends, and the next one is
    sent it again. Whoever drives the worker scales it by what steps took (`StepResult.elapsed_s`).
    """

    scheduler_epoch: int
    step: int
    timeout_s: float = 60.0
    opens: list[Open] = []


class RowError(HotPart, frozen=True):
    """A row that could not be computed; the others of its step could."""

    row: int
    code: str
    message: str


class StepResult(HotMessage, frozen=True):
    """What a step drew: `token_ids[i]` for row i, -1 where it was to draw nothing or failed.

    `extras[i]` goes beside `token_ids[i]` to the gateway, which knows what it means; of `MAX_EXTRA_BYTES` at most,
    empty where there is none, and no list where no row has one.
    A worker that answers anything else (other counts, ids outside the vocabulary) is fenced.
    """

    scheduler_epoch: int
    step: int
    token_ids: list[int]
    errors: list[RowError] = []
    elapsed_s: float = 0.0
    extras: list[bytes] = []


class StepMismatch(Message, frozen=True):
    """Tell, worker -> scheduler: the step was not run, nor any after it.

    It has a row of a sequence that is not open here, or gives it pages behind a gap. The scheduler adopts at once, and
    sends its steps again as to a worker that knows nothing; refused again, the worker is fenced. A rank that others
    compute with ends instead, and its group with it: they may have begun the step.
    """

    scheduler_epoch: int
    step: int
    reason: str


class Adopt(Message, frozen=True):
    """A scheduler takes a worker over: queued steps are dropped, the running one is finished first.

    `next_step` is the first step that follows; 0 leaves it to the first that arrives. Asked again by the same epoch it
    drops nothing but steps before `next_step`. A lower epoch than the worker has seen is refused (`stale_epoch`).
    """

    scheduler_epoch: int
    next_step: int = 0


class Adopted(Message, frozen=True):
    """The worker is the scheduler's: nothing of an earlier epoch's steps runs any more.

    `incarnation` is that of the pool it computes on (0: it does not say). A scheduler that has mapped another one ends:
    its pages are not there.
    `group_epoch` is the epoch of rank 0 in the group of tensor-parallel ranks that the worker computes with; 0: it
    computes alone.
    """

    worker_epoch: int
    numerics: str
    vocab_size: int
    max_batch_tokens: int = 0
    incarnation: int = 0
    group_epoch: int = 0


class Fence(Message, frozen=True):
    """Tell, scheduler -> worker: your answers cannot be believed. The worker ends; its successor is adopted.

    Of a scheduler epoch or worker epoch that is over, it is ignored. Repeated until another incarnation answers.
    """

    scheduler_epoch: int
    worker_epoch: int
    reason: str
