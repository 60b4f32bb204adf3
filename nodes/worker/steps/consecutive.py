"""A plan of several consecutive steps, taken apart: what a scheduler sends that expects nothing new for a while.

Decoding rows differ from step to step in their position alone, so that all steps but the first need not be sent. Taken
apart they have numbers of their own and are run, answered, repeated and dropped like any others. Used by the core.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from mesh.transport.base import Buffer
from nodes.protocol import StepPlan
from nodes.protocol.steps import MAX_STEPS, ROW_WIDTH, RowColumn

_START, _COUNT, _DRAWS, _FIRST_PAGE, _NUM_PAGES = (
    slice(column, None, ROW_WIDTH)
    for column in (RowColumn.START, RowColumn.COUNT, RowColumn.DRAWS, RowColumn.FIRST_PAGE, RowColumn.NUM_PAGES)
)
_LARGEST: Final = 2**31 - 1

Consecutive = list[tuple[StepPlan, Sequence[Buffer]]]
"""Steps, each as a plan and its buffers."""


def taken_apart(plan: StepPlan, buffers: Sequence[Buffer]) -> Consecutive | None:
    """The steps of a plan; None if it is not one that has several. What else is wrong with it is the first step's."""
    if plan.num_steps == 1:
        return [(plan, buffers)]
    if not 1 < plan.num_steps <= MAX_STEPS or len(buffers) != 3:
        return None
    parts = [memoryview(buffer).cast("B") for buffer in buffers]
    if len(parts[0]) % (4 * ROW_WIDTH):
        return None
    rows = array("i")
    rows.frombytes(parts[0])
    num_rows = len(rows) // ROW_WIDTH
    ones = array("i", [1]) * num_rows
    starts, firsts, counts = rows[_START], rows[_FIRST_PAGE], rows[_NUM_PAGES]
    # Of rows with more tokens, or which draw none, nothing says what the next step's are. Sums beyond 32 bits are not
    # numbers of a row.
    if not num_rows or rows[_COUNT] != ones or rows[_DRAWS] != ones or max(starts) > _LARGEST - MAX_STEPS:
        return None
    # The first step has put its pages in their places, so that every later row begins behind them and brings none.
    placed = [first + count for first, count in zip(firsts, counts, strict=True)]
    if max(placed) > _LARGEST:
        return None
    first = msgspec.structs.replace(plan, num_steps=1)
    found: Consecutive = [(first, buffers)]
    rows[_FIRST_PAGE], rows[_NUM_PAGES] = array("i", placed), array("i", bytes(4 * num_rows))
    # One buffer for all of them: a step copies its input tokens before it fills in what was drawn.
    drawn_before = memoryview(array("i", [-1]) * num_rows).cast("B")
    for number in range(1, plan.num_steps):
        later = rows[:]
        later[_START] = array("i", [start + number for start in starts])
        its = msgspec.structs.replace(first, step=plan.step + number, opens=[])
        found.append((its, (memoryview(later).cast("B"), drawn_before, memoryview(b""))))
    return found
