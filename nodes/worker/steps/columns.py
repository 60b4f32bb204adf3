"""A step's buffers as columns, and what can be said about them without knowing any sequence. Used by the core.

All of a step is checked by reductions over its columns: row by row 256 rows at a context of 1,024 took 1.4 ms.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mesh.transport.base import Buffer
from nodes.protocol import StepPlan
from nodes.protocol.steps import MAX_SLOTS, ROW_WIDTH, RowColumn

Numbers = npt.NDArray[np.int64]
"""64 bits, so that no sum of what a plan says overflows."""
Int32s = npt.NDArray[np.int32]


class Limits(NamedTuple):
    """What a plan must keep to."""

    num_pages: int
    page_size: int
    vocab_size: int
    context_length: int
    max_batch_tokens: int

    @property
    def most_pages(self) -> int:
        """Pages that a sequence can have."""
        return -(-self.context_length // self.page_size)


class Columns(NamedTuple):
    """The rows of a step: one array `[n]` for each `RowColumn`, in that order; then its token and page ids.

    `token_ids` are a copy, to fill in what was drawn.
    """

    slots: Numbers
    sequences: Numbers
    starts: Numbers
    counts: Numbers
    draws: Numbers
    first_pages: Numbers
    num_pages: Numbers
    token_ids: Int32s
    page_ids: Int32s

    @property
    def ends(self) -> Numbers:
        """Positions that are in the pages when the rows have run."""
        return self.starts + self.counts


def read_columns(plan: StepPlan, buffers: Sequence[Buffer], limits: Limits) -> Columns | str:
    """The columns of a step, or what is wrong with it as a whole, in words."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    if len(sizes) != 3:
        return f"a step has the buffers rows, token_ids and page_ids, this one has {len(sizes)}"
    if not plan.timeout_s > 0:
        return f"a step may take some time, not {plan.timeout_s:g} s"
    if sizes[0] % (4 * ROW_WIDTH) or sizes[1] % 4 or sizes[2] % 4:
        return f"buffers of {sizes} bytes do not hold rows of {ROW_WIDTH} numbers, token ids and page ids"
    rows = np.frombuffer(buffers[0], np.int32).reshape(-1, ROW_WIDTH).astype(np.int64)
    token_ids, page_ids = np.frombuffer(buffers[1], np.int32).copy(), np.frombuffer(buffers[2], np.int32)
    if not len(rows):
        return "tokens or pages of no row" if len(token_ids) or len(page_ids) else NO_ROWS
    if problem := _problem(rows, token_ids, page_ids, limits):
        return problem
    slots, sequences, starts, counts, draws, firsts, num_pages = np.ascontiguousarray(rows.T)
    return Columns(slots, sequences, starts, counts, draws, firsts, num_pages, token_ids, page_ids)


def num_rows_of(buffers: Sequence[Buffer]) -> int:
    """How many rows a step has, whatever else is wrong with it."""
    return memoryview(buffers[0]).nbytes // (4 * ROW_WIDTH) if buffers else 0


def slots_of(buffers: Sequence[Buffer]) -> list[int]:
    """The slots of a step's rows; none where these cannot be read."""
    rows = memoryview(buffers[0]).cast("B") if buffers else memoryview(b"")
    if len(rows) % (4 * ROW_WIDTH):
        return []
    slots: list[int] = np.frombuffer(rows, np.int32).reshape(-1, ROW_WIDTH)[:, RowColumn.SLOT].tolist()
    return slots


def stands_alone(buffers: Sequence[Buffer]) -> bool:
    """No row hangs on what another step draws."""
    token_ids = memoryview(buffers[1]).cast("B") if len(buffers) == 3 else memoryview(b"")
    return len(token_ids) % 4 > 0 or bool(np.frombuffer(token_ids, np.int32).min(initial=0) >= 0)


def runs(starts: Numbers, counts: Numbers) -> Numbers:
    """`starts[i], starts[i] + 1, ...`, `counts[i]` numbers of each, one run after the other. There is at least one."""
    ends = counts.cumsum()
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1], dtype=np.int64)


def _problem(rows: Numbers, token_ids: Int32s, page_ids: Int32s, limits: Limits) -> str:
    """Why its rows cannot be told apart, or taken one after the other; empty if they can."""
    # Three reductions over all columns: a call into numpy takes longer than what it does to a step of few rows.
    least, most, sums = rows.min(axis=0).tolist(), rows.max(axis=0).tolist(), rows.sum(axis=0).tolist()
    column = RowColumn
    if min(least) < 0 or least[column.COUNT] < 1:
        return "no number of a row is negative, and it has at least one token"
    if most[column.DRAWS] > 1:
        return "a row draws one token or none"
    num_tokens, num_pages = sums[column.COUNT], sums[column.NUM_PAGES]
    if num_tokens > limits.max_batch_tokens:
        return f"{num_tokens} tokens are more than the {limits.max_batch_tokens} that one step may have"
    if num_tokens != len(token_ids) or num_pages != len(page_ids):
        sizes = f"{len(token_ids)} token ids and {len(page_ids)} page ids"
        return f"{sizes} are not those of rows with {num_tokens} tokens and {num_pages} pages"
    if most[column.SLOT] >= MAX_SLOTS:
        return f"slots are 0..{MAX_SLOTS - 1}"
    if len(rows) > 1 and np.bincount(rows[:, column.SLOT]).max() > 1:
        return "a slot has one row in a step"
    if num_pages and (page_ids.min() < 1 or page_ids.max() >= limits.num_pages):
        return f"a page is not in 1..{limits.num_pages - 1}"
    if most[column.FIRST_PAGE] + most[column.NUM_PAGES] > limits.most_pages:
        last = int((rows[:, column.FIRST_PAGE] + rows[:, column.NUM_PAGES]).max())
        if last > limits.most_pages:
            return f"a context of {limits.context_length} has no page number {last - 1}"
    return ""


_NONE: Numbers = np.empty(0, np.int64)
_NO_IDS: Int32s = np.empty(0, np.int32)
NO_ROWS: Final = Columns(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NO_IDS, _NO_IDS)
