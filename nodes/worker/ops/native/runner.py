"""Runs steps by a recorded program: one call of the library for each, the sampler for rows that are not greedy.

Synchronous, used by one thread. Stateless between steps but for the pages.
"""

from array import array
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from kvstore.pool.page_pool import PagePool
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.parallel.collectives import of_all_ranks
from nodes.worker.pool.view import PoolView
from nodes.worker.sampler import Draw, sample
from nodes.worker.steps.step import RemappableRunner, RunnableStep, StepOutcome, drawn_outcome


class NativeRunner(RemappableRunner):
    """One rank's runner on the CPU. `numerics` is the fingerprint of library, model and CPU."""

    def __init__(self, steps: NativeSteps, numerics: str) -> None:
        self._steps = steps
        self.numerics = numerics

    @override
    def unmap(self, *, backs_up: bool) -> None:
        """In host memory there is nowhere else to keep weights."""
        assert not backs_up, "host memory is not backed up in host memory"
        self._steps.unmap()

    @override
    def remap(self, pool: PagePool) -> None:
        """Compute over another pool of the same layout, with the same weights."""
        self._steps.remap(PoolView(pool.pages_view, pool.layout))

    @override
    def run(self, step: RunnableStep) -> StepOutcome:
        """Write KV of all rows, draw tokens for those that sample. Raises if the step cannot be computed.

        Raises CollectiveFailed for whatever goes wrong in a group of ranks.
        """
        with of_all_ranks(self._steps.collectives, f"step {step.step}"):
            return self._run(step)

    def _run(self, step: RunnableStep) -> StepOutcome:
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
    _, starts, counts, _, offsets, page_offsets, _, samplings, *_ = zip(*step.rows, strict=True)
    firsts = list(accumulate(counts, initial=0))
    num_tokens, token_ids = firsts.pop(), step.token_ids
    if len(token_ids) != num_tokens or list(offsets) != firsts:
        # Rows that could not be computed were left out of the step, and not their tokens.
        token_ids = array("i")
        for offset, count in zip(offsets, counts, strict=True):
            token_ids.extend(step.token_ids[offset : offset + count])
    spans = [0] * (4 * len(starts))
    spans[0::4], spans[1::4], spans[2::4], spans[3::4] = starts, counts, page_offsets, firsts
    sampling = [index for index, one in enumerate(samplings) if one is not None]
    sampled = [firsts[index] + counts[index] - 1 for index in sampling]
    tokens, pages = np.frombuffer(token_ids, np.int32), np.frombuffer(step.page_ids, np.int32)
    return Columns(tokens, np.array(spans, np.int32).reshape(-1, 4), pages, np.array(sampled, np.int32)), sampling
