"""Runs steps with a recorded program: one call of the library for each, the sampler for rows that are not greedy.

Synchronous, used by one thread. Keeps no state between steps except the pages.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from kvstore.pool.page_pool import PagePool
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.parallel.collectives import of_all_ranks
from nodes.worker.pool.view import PoolView
from nodes.worker.sampler import Draw, sample
from nodes.worker.steps.step import (
    RemappableRunner,
    RowColumns,
    RunnableRow,
    RunnableStep,
    StepOutcome,
    drawn_outcome,
)


class NativeRunner(RemappableRunner):
    """One rank's runner on the CPU. `numerics` is the fingerprint of library, model and CPU."""

    def __init__(self, steps: NativeSteps, numerics: str) -> None:
        self._steps = steps
        self.numerics = numerics

    @override
    def unmap(self, *, backs_up: bool) -> None:
        """`backs_up` must be False: in host memory there is nowhere else to keep weights."""
        assert not backs_up, "host memory is not backed up in host memory"
        self._steps.unmap()

    @override
    def remap(self, pool: PagePool) -> None:
        """Compute over another pool of the same layout, with the same weights."""
        self._steps.remap(PoolView(pool.pages_view, pool.layout))

    @override
    def run(self, step: RunnableStep) -> StepOutcome:
        """Write KV of all rows, draw tokens for those that sample. Raises if the step cannot be computed.

        Raises CollectiveFailed for any failure in a group of ranks.
        """
        if self._steps.collectives is None:
            return self._run(step)
        with of_all_ranks(self._steps.collectives, f"step {step.step}"):
            return self._run(step)

    def _run(self, step: RunnableStep) -> StepOutcome:
        columns, sampling, altered = columns_of(step)
        if not altered and self._steps.collectives is None:
            # No tensor is made, so `inference_mode` is not needed: of 45 us of Python for a step of one row (its
            # kernels: 370 us), that and the objects for its draws were 15.
            return drawn_outcome(step, sampling, self._steps.run(columns, wants_logits=False)[0].tolist())
        # Greedy rows use the head's own argmax: a row's logits are 608 kB at 151,936 words, to be written and read.
        with torch.inference_mode():
            likely, logits = self._steps.run(columns, wants_logits=bool(altered))
            drawn = likely.tolist()
            if logits is not None and altered:
                tokens = sample(logits[[at for at, _ in altered]], [draw for _, draw in altered])
                for (at, _), token in zip(altered, tokens, strict=True):
                    drawn[at] = token
        return drawn_outcome(step, sampling, drawn)

    def logits(self, step: RunnableStep) -> dict[int, Tensor]:
        """Logits `[vocab]` of each row that samples, float32, by the row's index in the plan; for tests."""
        columns, sampling, _ = columns_of(step)
        with torch.inference_mode():
            _, logits = self._steps.run(columns, wants_logits=True)
        assert logits is not None
        return {step.rows[index].row: logits[i] for i, index in enumerate(sampling)}


def columns_of(step: RunnableStep) -> tuple[Columns, Sequence[int], list[tuple[int, Draw]]]:
    """The step as the program takes it, and the indices of its rows that draw; for each of those that does not simply
    take the most likely token, its place among them and how it draws.
    """
    rows, token_ids = step.rows, step.token_ids
    if isinstance(rows, RowColumns):
        starts, counts, page_offsets, firsts = rows.starts, rows.counts, rows.page_offsets, rows.token_offsets
        sampling = range(len(starts))
        # Usually most requests are plainly greedy, or none is: an object for each draw took 100 us at 256 rows.
        unsure: Iterable[int] = [at for at, one in enumerate(rows.found) if not one.is_plain]
    else:
        _, starts, counts, _, offsets, page_offsets, _, samplings, *_ = zip(*rows, strict=True)
        firsts = list(accumulate(counts, initial=0))
        num_tokens = firsts.pop()
        if len(token_ids) != num_tokens or list(offsets) != firsts:
            # Rows that could not be computed were left out of the step, but their tokens were not.
            token_ids = array("i")
            for offset, count in zip(offsets, counts, strict=True):
                token_ids.extend(step.token_ids[offset : offset + count])
        sampling = [index for index, one in enumerate(samplings) if one is not None]
        unsure = range(len(sampling))
    spans = [0] * (4 * len(starts))
    spans[0::4], spans[1::4], spans[2::4], spans[3::4] = starts, counts, page_offsets, firsts
    sampled = [firsts[index] + counts[index] - 1 for index in sampling]
    draws = [(at, _draw_of(rows[sampling[at]])) for at in unsure]
    return (
        Columns(token_ids, _packed(spans), step.page_ids, _packed(sampled)),
        sampling,
        [(at, draw) for at, draw in draws if not draw.is_plain],
    )


def _draw_of(row: RunnableRow) -> Draw:
    assert row.sampling is not None, "only rows that sample draw"
    return Draw(row.sampling, row.output_position, row.history)


def _packed(numbers: list[int]) -> "array[int]":
    """Packed by C code: `array` converts the numbers of a list one by one, which takes 50 us for 1,024 and not 23."""
    packed = array("i")
    packed.frombytes(struct.pack(f"={len(numbers)}i", *numbers))
    return packed
