"""A step as the scheduler has it: its columns, the sequences of its rows, and its outcome. Pure.

A worker's table is empty after every `Adopted`. A sequence knows in which table it was opened and how many pages it was
given there (`table`, `num_placed`); a step holds what was new when it was composed, and is encoded anew for another
table.
"""

from array import array
from typing import NamedTuple

from nodes.protocol import RowError
from nodes.protocol.steps import ROW_WIDTH, Open, RowColumn
from nodes.scheduler.sequence import Sequence


class Step(NamedTuple):
    """What batching composed: rows (`ROW_WIDTH` numbers each), their sequences, their input tokens (-1: drawn by the
    previous step, and not known yet), and the pages and sequences that are new to the worker.
    """

    rows: "array[int]"
    sequences: list[Sequence]
    token_ids: "array[int]"
    page_ids: "array[int]"
    opens: list[Open]

    def column(self, column: RowColumn) -> "array[int]":
        return self.rows[column::ROW_WIDTH]

    def opened_in(self, table: int) -> "Step":
        """The same step for a worker whose table only holds what was opened in `table` so far.

        Pages are only appended while a row is in flight, so the row's pages are still the sequence's first ones.
        """
        rows, page_ids, opens = self.rows[:], array("i"), list[Open]()
        firsts, counts = self.column(RowColumn.FIRST_PAGE), self.column(RowColumn.NUM_PAGES)
        for at, (sequence, first, count) in enumerate(zip(self.sequences, firsts, counts, strict=True)):
            end, begin = first + count, first
            if sequence.table != table:
                # The first row of each in the new table carries all its pages: what was placed in the old one is gone.
                sequence.table, begin = table, 0
                opens.append(sequence.opening())
            page_ids.extend(sequence.page_ids[begin:end])
            rows[at * ROW_WIDTH + RowColumn.FIRST_PAGE] = begin
            rows[at * ROW_WIDTH + RowColumn.NUM_PAGES] = end - begin
        return self._replace(rows=rows, page_ids=page_ids, opens=opens)

    def filled_in(self, drawn: dict[int, int]) -> "Step":
        """The same step with the tokens of `drawn`, by `row_id`, filled in; a copy, since lent buffers must not change.

        A row that depends on a failed one belongs to an ended sequence; it is computed on token 0 and dropped.
        """
        token_ids = self.token_ids[:]
        offset = 0
        for sequence, count in zip(self.sequences, self.column(RowColumn.COUNT), strict=True):
            # Only rows of one token have placeholders, and theirs is the first: chunks consist of known tokens.
            if token_ids[offset] < 0:
                token_ids[offset] = max(0, drawn[sequence.row_id])
            offset += count
        return self._replace(token_ids=token_ids)


class Acknowledged(NamedTuple):
    """A step that ran: `token_ids[i]` was drawn by row i, -1 for nothing, with `extras[i]` if any; `errors` by row.

    `prompt_extras[i]` is what row i read of its prompt, if any row did, and `vectors[i]` the vector that it made or
    what it has pooled so far.
    """

    step: Step
    token_ids: list[int]
    errors: dict[int, RowError]
    extras: list[bytes]
    prompt_extras: list[bytes]
    vectors: list[bytes] = []

    def drawn(self) -> dict[int, int]:
        """What each sequence drew, by `row_id`."""
        pairs = zip(self.step.sequences, self.token_ids, strict=True)
        return {sequence.row_id: token_id for sequence, token_id in pairs}
