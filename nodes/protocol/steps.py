"""Between scheduler and worker: numbered steps, and how a scheduler takes over a worker."""

import enum
from typing import Final

from mesh.wire.message import HotMessage, HotPart, Message
from nodes.request import TOKENS, Sampling


class RowColumn(enum.IntEnum):
    """Columns of a step's rows: the index of each number in a row.

    `SLOT` and `SEQUENCE` name the row's sequence, as opened. Its `COUNT` input tokens are at positions from `START` on,
    prompt and output counted together; the last `DRAWS` of them (0 or 1) draw a token, whose output position (the
    randomness counter) is `START + COUNT - num_prompt_tokens`. `NUM_PAGES` pages become the sequence's pages from
    number `FIRST_PAGE` on.
    """

    SLOT = 0
    SEQUENCE = 1
    START = 2
    COUNT = 3
    DRAWS = 4
    FIRST_PAGE = 5
    NUM_PAGES = 6


ROW_WIDTH: Final = len(RowColumn)
"""How many numbers a row has."""
MAX_STEPS: Final = 8
"""Most steps of one plan. Two such plans are a page of 16 tokens, which the death of a worker may cost anyway."""
MAX_SLOTS: Final = 1 << 16
"""How many slots a worker's table has."""
MAX_EXTRA_BYTES: Final = 4096
"""Most bytes that may accompany one drawn token."""
MAX_VECTOR_BYTES: Final = 1 << 18
"""Most bytes of a vector: 65,536 numbers, four times the hidden size of the largest models."""
ROW_ERRORS: Final = (
    "bad_step", "bad_row", "missing_input", "corrupt_page", "poisoned_request", "unsupported_ask", "editor_failed",
    "grammar_failed", "nothing_left",
)  # fmt: skip
"""Why a row cannot be computed or drawn: the codes of `RowError`."""
LAST_SEQUENCE: Final = 2**31 - 1
"""A sequence's number fits 32 bits."""


class Open(HotPart, frozen=True):
    """`sequence` (`num_prompt_tokens` of prompt, drawn by `sampling`) takes `slot`; its previous owner is forgotten.

    It has no pages yet. `sequence` is the scheduler's number for it; `request_id` is for the worker's log. If its
    sampling looks back (a penalty, a grammar), `token_ids` are its tokens from position 0 on, at least up to its first
    row, because pages hold what was computed from tokens and not the tokens themselves. If it reads its prompt, they
    are at least the whole prompt: what is read at the end of a chunk is about the token after it.
    With a `kind` of `VECTOR_KINDS` the sequence makes a vector of its prompt and draws nothing. `pooled` is then what
    the scheduler was last answered for it (`StepResult.vectors`), of its first `num_pooled` positions: its next row
    begins there. Empty: nothing was pooled yet. `second_from` as in `RequestSpec`.
    """

    slot: int
    sequence: int
    num_prompt_tokens: int
    sampling: Sampling
    request_id: str = ""
    token_ids: list[int] = []
    kind: str = TOKENS
    pooled: bytes = b""
    num_pooled: int = 0
    second_from: int = 0


class StepPlan(HotMessage, frozen=True):
    """One forward pass. Buffers, little-endian int32: `rows[n, 7]` (see `RowColumn`), `token_ids` and `page_ids` of all
    rows, one row's after the other's.

    `opens` apply before the rows. A token of -1, alone in its row, stands for the token that the sequence drew for that
    position in an earlier step, which the scheduler does not know yet. The pages of a row, with those that its sequence
    has, cover at least positions `0 .. START + COUNT`; a step's pages are put in their places, not appended, so a step
    can be sent again as it is. A sequence has at most one row. Rows finish in order; the worker runs steps in order of
    `step`, refuses other epochs, and answers a step it has already done with the same result.
    A step that has not ended `timeout_s` (above 0) after the one before it hangs: the worker ends, and its successor
    gets the step again. The scheduler derives `timeout_s` from how long steps took (`StepResult.elapsed_s`).

    With `num_steps` above 1 (at most `MAX_STEPS`) this is that many consecutive steps of the same rows, numbered from
    `step` on, each as if it had come by itself: `opens` and pages are the first one's, every further one starts each
    row a position later, with what the one before it draws as its only input. All rows have one token, which draws.
    """

    scheduler_epoch: int
    step: int
    timeout_s: float = 60.0
    opens: list[Open] = []
    num_steps: int = 1


class RowError(HotPart, frozen=True):
    """A row that could not be computed or drawn; the other rows of the step were.

    `retryable` False: it would fail anywhere, so the request ends.

    Codes: `bad_step`, `bad_row`, `missing_input`, `corrupt_page`, `poisoned_request`, `unsupported_ask`,
    `editor_failed`, `grammar_failed`, `nothing_left`.
    """

    row: int
    code: str
    message: str
    retryable: bool = True


class StepResult(HotMessage, frozen=True):
    """What a step drew: `token_ids[i]` for row i, -1 if the row was to draw nothing or failed.

    `extras[i]` accompanies `token_ids[i]` to the gateway, which knows what it means; at most `MAX_EXTRA_BYTES`, empty
    if row i has none. The list is empty if no row has one.
    If the sampling of row i reads its prompt, `prompt_extras[i]` are as many payloads of one size, one after the other,
    as the row has positions `p` with `p + 1 < num_prompt_tokens`: what the model said at `p` of the prompt's token at
    `p + 1`. Of other rows and failed ones it is empty, and so is the list if that holds for all.
    If row i belongs to a sequence that makes a vector and ends its prompt, `vectors[i]` is that vector: float32,
    little-endian, at most `MAX_VECTOR_BYTES`. If it ends before that, `vectors[i]` is what the rest is pooled with
    (kind `mean`: the sum of the states so far; `cls`: the first one), or nothing (`last`). Of other rows and failed
    ones it is empty, and so is the list if that holds for all.
    A worker that answers anything else (other counts, ids outside the vocabulary) is fenced.
    """

    scheduler_epoch: int
    step: int
    token_ids: list[int]
    errors: list[RowError] = []
    elapsed_s: float = 0.0
    extras: list[bytes] = []
    prompt_extras: list[bytes] = []
    vectors: list[bytes] = []


class StepResults(HotMessage, frozen=True):
    """Results of steps of one plan, in order, each as if it had been told by itself.

    A worker that is given several steps at once tells their results together: all, or those of a millisecond. That of a
    step with `opens` goes at once: a client waits for its first token.
    """

    results: list[StepResult]


class StepMismatch(Message, frozen=True):
    """Tell, worker -> scheduler: the step was not run, nor any after it.

    The step has a row of a sequence that is not open at the worker, or gives a sequence pages beyond a gap. The
    scheduler adopts the worker again at once and sends its steps as to one that knows nothing; if that is refused too,
    the worker is fenced. A tensor-parallel rank ends instead, and its group with it, because other ranks may have begun
    the step.
    """

    scheduler_epoch: int
    step: int
    reason: str


class Adopt(Message, frozen=True):
    """A scheduler takes over a worker, which drops queued steps and finishes the running one first.

    `next_step` is the number of the first step to run; 0: whichever arrives first. If the same epoch asks again, only
    steps before `next_step` are dropped. An epoch lower than one the worker has seen is refused (`stale_epoch`).
    """

    scheduler_epoch: int
    next_step: int = 0


class Adopted(Message, frozen=True):
    """The worker belongs to the scheduler: no step of an earlier epoch runs any more.

    `incarnation` is that of the pool that the worker computes on (0: not said). A scheduler that has mapped another
    incarnation ends, because its pages are not in that pool.
    `group_epoch` is the epoch of rank 0 in the group of tensor-parallel ranks that the worker computes with; 0: it
    computes alone. `asks` are the names, with versions, of what it can do for a draw (`Asked.name`).
    `start_s` is how long its start took, from its process's first moment until it was ready (0: not said): if it dies,
    the next one is there after about that time.
    """

    worker_epoch: int
    numerics: str
    vocab_size: int
    max_batch_tokens: int = 0
    incarnation: int = 0
    group_epoch: int = 0
    asks: list[str] = []
    start_s: float = 0.0


class Fence(Message, frozen=True):
    """Tell, scheduler -> worker: your answers cannot be believed. The worker ends; its successor is adopted.

    Ignored if the scheduler epoch or the worker epoch is over. Repeated until another incarnation answers.
    """

    scheduler_epoch: int
    worker_epoch: int
    reason: str
