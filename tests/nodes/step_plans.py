"""Plans and their buffers from rows as one would write them down, and back."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nodes.protocol import StepPlan
from nodes.protocol.steps import ROW_WIDTH, Open, RowColumn
from nodes.request import Sampling


class Row(NamedTuple):
    """`pages` become the sequence's from number `first_page` on; `tokens` are at positions from `start` on.

    With `opens` its sequence is opened in the same step.
    """

    sequence: int
    tokens: Sequence[int] = (1,)
    pages: Sequence[int] = ()
    start: int = 0
    prompt: int = 1
    sampling: Sampling | None = Sampling()
    slot: int = 0
    first_page: int = 0
    opens: bool = True
    request_id: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        draws = int(self.sampling is not None)
        return self.slot, self.sequence, self.start, len(self.tokens), draws, self.first_page, len(self.pages)


def plan_of(step: int, rows: Iterable[Row], epoch: int = 1, **more: Any) -> tuple[StepPlan, list[bytes]]:
    """A step of these rows; `slot` of each is as said."""
    rows = list(rows)
    opens = [
        Open(row.slot, row.sequence, row.prompt, row.sampling or Sampling(), row.request_id)
        for row in rows
        if row.opens
    ]
    buffers = [
        array("i", [number for row in rows for number in row.numbers]).tobytes(),
        array("i", [token for row in rows for token in row.tokens]).tobytes(),
        array("i", [page for row in rows for page in row.pages]).tobytes(),
    ]
    return StepPlan(scheduler_epoch=epoch, step=step, opens=opens, **more), buffers


def column(buffers: Sequence[Any], of: RowColumn) -> list[int]:
    """A column of a step's rows."""
    return list(memoryview(buffers[0]).cast("B").cast("i"))[of::ROW_WIDTH]
