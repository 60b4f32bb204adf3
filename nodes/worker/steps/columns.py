"""A step's buffers as columns, and the checks on them that need no sequence. Used by the core.

Columns are lists, and a step is checked with Python's operations on whole lists: a call into numpy takes a microsecond
however little it does, and with some sixty of them a step of one row took 180 µs.
"""

from array import array
from collections.abc import Sequence
from operator import add
from typing import Final, NamedTuple

from mesh.transport.base import Buffer
from nodes.protocol import StepPlan
from nodes.protocol.steps import MAX_SLOTS, ROW_WIDTH, RowColumn


class Limits(NamedTuple):
    """The limits that a plan must respect."""

    num_pages: int
    page_size: int
    vocab_size: int
    context_length: int
    max_batch_tokens: int

    @property
    def most_pages(self) -> int:
        return -(-self.context_length // self.page_size)


class Columns(NamedTuple):
    """The rows of a step: a list `[n]` for each `RowColumn`, in that order; then its token and page ids, int32.

    `token_ids` is a copy, into which drawn tokens are filled. `batch_key`: the columns that stay the same from step to
    step while a batch decodes, as they came.
    """

    slots: list[int]
    sequences: list[int]
    starts: list[int]
    counts: list[int]
    draws: list[int]
    first_pages: list[int]
    num_pages: list[int]
    token_ids: "array[int]"
    page_ids: "array[int]"
    batch_key: "tuple[array[int], ...]" = ()


_BATCH_KEY: Final = [
    slice(column, None, ROW_WIDTH) for column in (RowColumn.SLOT, RowColumn.SEQUENCE, RowColumn.COUNT, RowColumn.DRAWS)
]
_PLACES: Final = [
    slice(column, None, ROW_WIDTH) for column in (RowColumn.START, RowColumn.FIRST_PAGE, RowColumn.NUM_PAGES)
]
NO_ROWS: Final = Columns([], [], [], [], [], [], [], array("i"), array("i"))


def read_columns(plan: StepPlan, buffers: Sequence[Buffer], limits: Limits, before: Columns = NO_ROWS) -> Columns | str:
    """The columns of a step, or what is wrong with it as a whole, in words.

    `before`: the result for an earlier step. If that had the same rows, its lists are used again in this result.
    """
    parts = [memoryview(buffer).cast("B") for buffer in buffers]
    sizes = [len(part) for part in parts]
    if len(sizes) != 3:
        return f"a step has three buffers (rows, token_ids and page_ids), this one has {len(sizes)}"
    # Written so that NaN is refused, too: every comparison with it is false.
    if not plan.timeout_s > 0:
        return f"timeout_s must be positive, not {plan.timeout_s:g}"
    # Before any cast, which would raise: an invalid step must be answered, and must not end its reader.
    if sizes[0] % (4 * ROW_WIDTH) or sizes[1] % 4 or sizes[2] % 4:
        return f"buffers of {sizes} bytes do not hold whole rows of {ROW_WIDTH} numbers, token ids and page ids"
    if not sizes[0]:
        return "token ids or page ids without rows" if sizes[1] or sizes[2] else NO_ROWS
    if not bytes(parts[0])[3::4].isascii():
        # The highest byte of each little-endian number holds its sign.
        return "a row has a negative number"
    numbers, token_ids, page_ids = array("i"), array("i"), array("i")
    # Copied, because drawn tokens are filled in, and the frame's memory belongs to the transport.
    for part, taken in zip(parts, (numbers, token_ids, page_ids), strict=True):
        taken.frombytes(part)
    batch_key = tuple([numbers[part] for part in _BATCH_KEY])
    # A batch that decodes has the same rows in each step. Comparing bytes shows that, and the columns need neither be
    # made into lists again (5 us for a column of 256) nor checked.
    if is_same := before.batch_key == batch_key:
        slots, sequences, counts, draws = before.slots, before.sequences, before.counts, before.draws
    else:
        slots, sequences, counts, draws = [column.tolist() for column in batch_key]
    starts, firsts, num_pages = [numbers[part].tolist() for part in _PLACES]
    columns = Columns(slots, sequences, starts, counts, draws, firsts, num_pages, token_ids, page_ids, batch_key)
    return _problem(columns, limits, is_same=is_same) or columns


def num_rows_of(buffers: Sequence[Buffer]) -> int:
    """How many rows a step has, whatever else is wrong with it."""
    return memoryview(buffers[0]).nbytes // (4 * ROW_WIDTH) if buffers else 0


def slots_of(buffers: Sequence[Buffer]) -> list[int]:
    """The slots of a step's rows; empty if the rows cannot be read."""
    rows = memoryview(buffers[0]).cast("B") if buffers else memoryview(b"")
    return [] if len(rows) % (4 * ROW_WIDTH) else rows.cast("i").tolist()[RowColumn.SLOT :: ROW_WIDTH]


def stands_alone(buffers: Sequence[Buffer]) -> bool:
    """Whether no row depends on what another step draws."""
    token_ids = memoryview(buffers[1]).cast("B") if len(buffers) == 3 else memoryview(b"")
    return len(token_ids) % 4 > 0 or min(token_ids.cast("i"), default=0) >= 0


def _problem(columns: Columns, limits: Limits, *, is_same: bool) -> str:
    """What is wrong with a step as a whole, in words; empty if nothing is.

    `is_same`: its slots, counts and draws are those of an earlier step, and were checked then.
    """
    slots, _, _, counts, draws, firsts, numbers, token_ids, page_ids, _ = columns
    if not is_same and (problem := _problem_of(slots, counts, draws)):
        return problem
    num_tokens, num_pages = sum(counts), sum(numbers)
    if num_tokens > limits.max_batch_tokens:
        return f"the step has {num_tokens} tokens, at most {limits.max_batch_tokens} are allowed"
    if num_tokens != len(token_ids) or num_pages != len(page_ids):
        sizes = f"{len(token_ids)} token ids and {len(page_ids)} page ids"
        return f"{sizes} do not match rows with {num_tokens} tokens and {num_pages} pages"
    if page_ids:
        # Page 0 is padding (kvstore/layout.py) and belongs to no sequence: its KV would be read as a context.
        if min(page_ids) < 1 or max(page_ids) >= limits.num_pages:
            return f"a page is not in 1..{limits.num_pages - 1}"
        if (last := max(map(add, firsts, numbers))) > limits.most_pages:
            return f"a context of {limits.context_length} has no page number {last - 1}"
    return ""


def _problem_of(slots: list[int], counts: list[int], draws: list[int]) -> str:
    # Whole columns by `min`, `max` and `sum`, which run in C: a loop over the rows costs more than all of this.
    if min(counts) < 1:
        return "a row has no token"
    if max(draws) > 1:
        return "a row draws more than one token"
    if max(slots) >= MAX_SLOTS:
        return f"a slot is not in 0..{MAX_SLOTS - 1}"
    # The running step's draws are looked up by slot, so two rows of one slot would take each other's.
    return "two rows have the same slot" if len(set(slots)) < len(slots) else ""
