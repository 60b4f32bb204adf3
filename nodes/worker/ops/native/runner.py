"""Runs steps by a recorded program: one call of the library for each, the sampler for rows that are not greedy.

Synchronous, used by one thread. Stateless between steps but for the pages.
"""

from array import array

import numpy as np
import torch
from torch import Tensor

from kvstore.pool.page_pool import PagePool
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.pool.view import PoolView
from nodes.worker.sampler import Draw, sample
from nodes.worker.steps.step import RunnableStep, StepOutcome, drawn_outcome


class NativeRunner:
    """See `Runner` and `RemappableRunner`."""

    def __init__(self, steps: NativeSteps, numerics: str) -> None:
        self._steps = steps
        self.numerics = numerics

    def unmap(self, *, backs_up: bool) -> None:
        """See `RemappableRunner`. In host memory there is nowhere else to keep weights."""
        assert not backs_up, "host memory is not backed up in host memory"
        self._steps.unmap()

    def remap(self, pool: PagePool) -> None:
        """Compute over another pool of the same layout, with the same weights."""
        self._steps.remap(PoolView(pool.pages_view, pool.layout))

    def run(self, step: RunnableStep) -> StepOutcome:
        """Write KV of all rows, draw tokens for those that sample. Raises if the step cannot be computed."""
        columns, sampling = columns_of(step)
        draws = [
            Draw(row.sampling, row.output_position, row.history)
            for row in (step.rows[index] for index in sampling)
            if row.sampling
        ]
        # Greedy rows have the head's own argmax: a row's logits are 608 kB at 151,936 words, written and read again.
        altered = [index for index, draw in enumerate(draws) if not draw.is_plain]
        with torch.inference_mode():
            likely, logits = self._steps.run(columns, wants_logits=bool(altered))
            drawn = likely.tolist()
            if logits is not None:
                tokens = sample(logits[altered], [draws[index] for index in altered])
                for index, token in zip(altered, tokens, strict=True):
                    drawn[index] = token
        return drawn_outcome(step, sampling, drawn)

    def logits(self, step: RunnableStep) -> dict[int, Tensor]:
        """Logits `[vocab]` of each row that samples, float32, by the row's index in the plan; for tests."""
        columns, sampling = columns_of(step)
        with torch.inference_mode():
            _, logits = self._steps.run(columns, wants_logits=True)
        assert logits is not None
        return {step.rows[index].row: logits[i] for i, index in enumerate(sampling)}


def columns_of(step: RunnableStep) -> tuple[Columns, list[int]]:
    """The step as the program takes it, and the indices of its rows that draw."""
    spans, sampled, token_ids = array("i"), array("i"), step.token_ids
    sampling: list[int] = []
    num_tokens, is_whole = 0, True
    for index, row in enumerate(step.rows):
        spans.extend((row.start, row.num_tokens, row.page_offset, num_tokens))
        is_whole = is_whole and row.token_offset == num_tokens
        num_tokens += row.num_tokens
        if row.sampling is not None:
            sampling.append(index)
            sampled.append(num_tokens - 1)
    if not is_whole or len(token_ids) != num_tokens:
        # Rows that could not be computed were left out of the step, and not their tokens.
        token_ids = array("i")
        for row in step.rows:
            token_ids.extend(step.token_ids[row.token_offset : row.token_offset + row.num_tokens])
    columns = (np.frombuffer(column, dtype=np.int32) for column in (token_ids, spans, step.page_ids, sampled))
    tokens, table, pages, rows = columns
    return Columns(tokens, table.reshape(-1, 4), pages, rows), sampling
