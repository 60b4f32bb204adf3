"""Rows of a step that are as its plan has them, by column: what decoding is, where a row each time is most of the work.

Runners that want rows get them, made when asked for; those that take columns (`ops/native/runner.py`) read these.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import overload

from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import RunnableRow, rows_from


class RowColumns(Sequence[RunnableRow]):
    """All rows of a plan, in its order; each draws, its inputs are known, and its sampling does not look back.

    Row i is of `found[i]`: `counts[i]` tokens at positions from `starts[i]` on, in the step's token ids from
    `token_offsets[i]` on; its sequence's pages are in the step's from `page_offsets[i]` on.
    """

    __slots__ = ("_made", "_page_size", "counts", "found", "page_offsets", "starts", "token_offsets")

    def __init__(
        self,
        found: list[OpenSequence],
        starts: list[int],
        counts: list[int],
        token_offsets: Sequence[int],
        page_offsets: list[int],
        page_size: int,
    ) -> None:
        self.found = found
        self.starts, self.counts = starts, counts
        self.token_offsets, self.page_offsets = token_offsets, page_offsets
        self._page_size = page_size
        self._made: list[RunnableRow] | None = None

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[RunnableRow]:
        return iter(self._rows())

    @overload
    def __getitem__(self, index: int) -> RunnableRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[RunnableRow]: ...

    def __getitem__(self, index: int | slice) -> RunnableRow | list[RunnableRow]:
        return self._rows()[index]

    def _rows(self) -> list[RunnableRow]:
        if self._made is None:
            # The same objects each time: who asks for one asks for others, and some are compared by identity.
            size = self._page_size
            fields = zip(
                range(len(self.found)),
                self.starts,
                self.counts,
                [one.num_prompt_tokens for one in self.found],
                self.token_offsets,
                self.page_offsets,
                [-(-(start + count) // size) for start, count in zip(self.starts, self.counts, strict=True)],
                [one.sampling for one in self.found],
                repeat(-1),
                [one.request_id for one in self.found],
                repeat(None),
            )
            self._made = rows_from(fields)
        return self._made
