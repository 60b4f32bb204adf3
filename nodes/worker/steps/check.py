"""Which rows of a step can be run, once its pages are in the table. Pure; used by the core for each step."""

import numpy as np

from nodes.protocol import RowError
from nodes.worker.steps.columns import Columns, Limits, Numbers
from nodes.worker.steps.sequence_table import Draws, SequenceTable
from nodes.worker.steps.step import MISSING_INPUT

BAD_ROW = "bad_row"


class RowCheck:
    """Checks all rows at once; a row that fails is looked at alone only to say why.

    `good` are the rows that can be run, their tokens are filled in. For all rows: `offsets` of their tokens,
    `num_pages` that their positions need, `sources` (the row of the step under way that draws the token, or -1; None:
    all tokens are known).
    """

    def __init__(self, limits: Limits, columns: Columns, table: SequenceTable, ahead: Draws | None) -> None:
        self._limits = limits
        self._columns = columns
        token_ids, ends = columns.token_ids, columns.ends
        self.offsets: Numbers = columns.counts.cumsum() - columns.counts
        self.num_pages: Numbers = (ends + (limits.page_size - 1)) // limits.page_size
        self.sources: Numbers | None = None
        self._has_pages = table.num_pages(columns)
        self._is_outside = ends > limits.context_length
        self._is_drawn_early = columns.draws > (ends >= table.num_prompt_tokens(columns))
        is_bad = self._is_outside | self._is_drawn_early | (self.num_pages > self._has_pages)
        if len(token_ids) and token_ids.min() < 0:
            unknown = np.flatnonzero((columns.counts == 1) & (token_ids[self.offsets] == -1))
            self.sources = table.fill_in(columns, self.offsets, unknown, ahead)
            lowest = np.minimum.reduceat(token_ids, self.offsets)
            is_bad |= (lowest < 0) & (self.sources < 0)
        if len(token_ids) and token_ids.max() >= limits.vocab_size:
            is_bad |= np.maximum.reduceat(token_ids, self.offsets) >= limits.vocab_size
        self.good = np.flatnonzero(~is_bad)
        self._bad = np.flatnonzero(is_bad).tolist() if len(self.good) < len(is_bad) else []

    def errors(self) -> list[RowError]:
        """Why rows cannot be run."""
        return [RowError(row, *self._problem(row)) for row in self._bad]

    def _problem(self, row: int) -> tuple[str, str]:
        columns, limits = self._columns, self._limits
        start, count, sequence = (int(column[row]) for column in (columns.starts, columns.counts, columns.sequences))
        if self._is_outside[row]:
            return BAD_ROW, f"positions {start} to {start + count} of a context of {limits.context_length}"
        if self.num_pages[row] > self._has_pages[row]:
            return BAD_ROW, f"{self._has_pages[row]} pages do not hold {start + count} positions"
        if self._is_drawn_early[row]:
            return BAD_ROW, "a token is to be drawn before the prompt ends"
        if count == 1 and columns.token_ids[self.offsets[row]] == -1:
            return MISSING_INPUT, f"sequence {sequence} drew no token for position {start} that is known here"
        return BAD_ROW, f"a token id is not in 0..{limits.vocab_size - 1}"
