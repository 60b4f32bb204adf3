"""Between scheduler and worker: numbered steps and the taking over of a worker."""

from mesh.message import HotMessage, HotPart, Message
from nodes.request import Sampling


class StepRow(HotPart, frozen=True):
    """One sequence's share of a step: `num_tokens` tokens from position `start` on, whose KV is written to its pages.

    `row_id` is the scheduler's number for the sequence. Positions count prompt and output together. If `sampling` is
    set, a token is drawn from the last position's logits; its output position (the randomness counter) is
    `start + num_tokens - num_prompt_tokens`. `from_row` >= 0: the row's only input token is what row number `from_row`
    (index into `rows`) of step `step - 1` drew, not known to the scheduler yet; the buffer then holds -1.
    Nothing else is remembered between steps: a step can be sent again as it is. `request_id` is for the worker's log.
    """

    row_id: int
    start: int
    num_tokens: int
    num_pages: int
    num_prompt_tokens: int
    sampling: Sampling | None = None
    from_row: int = -1
    request_id: str = ""


class StepPlan(HotMessage, frozen=True):
    """One forward pass. Buffers: `token_ids` int32 of all rows, `page_ids` int32 of all rows (each row's from 0 on).

    `num_pages` of a row covers at least positions `0 .. start + num_tokens`. Rows finish in order; the worker
    runs steps in order of `step`, refuses other epochs, and answers a step it has already done with the same result.
    A step that has not ended `timeout_s` (above 0) after the one before it hangs: the worker ends, and the next one is
    sent it again. Whoever drives the worker scales it by what steps took (`StepResult.elapsed_s`).
    """

    scheduler_epoch: int
    step: int
    rows: list[StepRow]
    timeout_s: float = 60.0


class RowError(HotPart, frozen=True):
    """A row that could not be computed; the others of its step could."""

    row: int
    code: str
    message: str


class StepResult(HotMessage, frozen=True):
    """What a step drew: `token_ids[i]` for `rows[i]`, -1 where row i was to draw nothing or failed.

    A worker that answers anything else (other counts, ids outside the vocabulary) is dismissed.
    """

    scheduler_epoch: int
    step: int
    token_ids: list[int]
    errors: list[RowError] = []
    elapsed_s: float = 0.0


class Adopt(Message, frozen=True):
    """A scheduler takes a worker over: queued steps are dropped, the running one is finished first.

    `next_step` is the first step that follows; 0 leaves it to the first that arrives. Asked again by the same epoch it
    drops nothing but steps before `next_step`. A lower epoch than the worker has seen is refused (`stale_epoch`).
    """

    scheduler_epoch: int
    next_step: int = 0


class Adopted(Message, frozen=True):
    """`last_step` is the last step the worker ran for the scheduler before (0: none).

    `incarnation` is that of the pool it computes on (0: it does not say). A scheduler that has mapped another one ends:
    its pages are not there.
    `group_epoch` is the epoch of rank 0 in the group of tensor-parallel ranks that the worker computes with; 0: it
    computes alone.
    """

    last_step: int
    worker_epoch: int
    numerics: str
    vocab_size: int
    max_batch_tokens: int = 0
    incarnation: int = 0
    group_epoch: int = 0


class Dismiss(Message, frozen=True):
    """Tell, scheduler -> worker: your answers cannot be believed. The worker ends; its successor is adopted.

    Of a scheduler epoch or worker epoch that is over, it is ignored. Repeated until another incarnation answers.
    """

    scheduler_epoch: int
    worker_epoch: int
    reason: str
