"""What a step's rows read of their prompts: which positions, and their payloads from the logits, a tile at a time.

Logits of a whole chunk are never there at once: 256 rows of 151,936 words take 156 MB.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from nodes.asks.edits import RowReads
from nodes.worker.draw.measuring import measured
from nodes.worker.draw.sampler import PLAIN
from nodes.worker.draw.stage import HostRows
from nodes.worker.steps.step import Rows, StepOutcome

TILE_ROWS: Final = 16
"""As many as `measured` takes at once; the head's weights are read from memory once for each tile."""


class PromptReads:
    """The positions that a step's rows read, one row's after the other's, and what was found there so far.

    A row reads the positions from its first on that are followed by a token of the prompt.
    """

    __slots__ = ("_lines", "_rows", "_spans", "_tokens", "_top", "num")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._lines: list[Tensor] = []
        self._spans: list[tuple[int, int]] = []
        """The index of each row that reads, and how many positions."""
        if not rows.is_whole:
            for index, (one, start, count) in enumerate(zip(rows.found, rows.starts, rows.counts, strict=True)):
                if one.prompt_reads is not None and (num := min(start + count, one.num_prompt_tokens - 1) - start) > 0:
                    self._spans.append((index, num))
        self.num = sum(num for _, num in self._spans)
        # The prompt's token after each place.
        self._tokens: list[int] = []
        for index, num in self._spans:
            begin = rows.starts[index] + 1
            self._tokens += rows.found[index].prompt_ids[begin : begin + num]
        self._top = max((self._reads(index).top for index, _ in self._spans), default=0)

    def places(self, firsts: Sequence[int]) -> "array[int]":
        """The batch's rows to compute logits of; row `index` of the step begins at `firsts[index]` there."""
        return array("i", [firsts[index] + at for index, num in self._spans for at in range(num)])

    def take(self, logits: Tensor, begin: int, own: HostRows | None = None) -> None:
        """Measure the next tile: logits of the `places` from number `begin` on; `own` is a backend's way to do it."""
        # Lines of one width, whatever each row wants.
        tokens, reads = self._tokens[begin : begin + len(logits)], [RowReads(self._top)] * len(logits)
        if own is None:
            on_device = torch.tensor(tokens, device=logits.device)
            lines = measured(logits, on_device, [PLAIN] * len(logits), reads)
        else:
            _, lines = own.draw(logits, {}, dict(enumerate(reads)), tokens)
        assert lines is not None, "every row of a tile is read"
        self._lines.append(lines)

    def lines(self) -> Tensor | None:
        """What was measured, where the logits were, a line for each place; None if nothing is read."""
        lines, self._lines = self._lines, []
        return torch.cat(lines) if lines else None

    def beside(self, outcome: StepOutcome, lines: Tensor | None) -> StepOutcome:
        """The outcome of the step with what was read: the `lines`, now on the host."""
        if lines is None:
            return outcome
        failed = {error.row for error in outcome.errors}
        extras, words, end = [b""] * len(self._rows), lines.numpy(), 0
        for index, num in self._spans:
            begin, end = end, end + num
            if self._rows.numbers[index] not in failed:
                extras[index] = words[begin:end, : 2 + 2 * self._reads(index).top].tobytes()
        return outcome._replace(prompt_extras=extras)

    def _reads(self, index: int) -> RowReads:
        reads = self._rows.found[index].prompt_reads
        assert reads is not None, "a row that reads"
        return reads
