"""Runs steps with a recorded program: one call of the library for each, and one more if rows are not plainly greedy.

Synchronous, used by one thread. Keeps no state between steps except the pages.
"""

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from kvstore.pool.page_pool import PagePool
from nodes.worker.draw.prompt import TILE_ROWS, PromptReads
from nodes.worker.draw.stage import Draws
from nodes.worker.ops.native.rows import NativeRows
from nodes.worker.ops.native.steps import Columns, NativeSteps, PooledRows
from nodes.worker.parallel.collectives import of_all_ranks
from nodes.worker.pool.view import PoolView
from nodes.worker.steps.step import RemappableRunner, RunnableStep, StepOutcome
from nodes.worker.vectors.pooling import Head, VectorRows, no_head


class NativeRunner(RemappableRunner):
    """One rank's runner on the CPU. `numerics` is the fingerprint of library, model and CPU."""

    def __init__(self, steps: NativeSteps, numerics: str, rows: NativeRows | None = None, head: Head = no_head) -> None:
        """`rows` draws where the most likely token is not enough; None: torch does. `head` comes behind a pooling."""
        self._steps = steps
        self._rows = rows
        self._head = head
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
        vectors, prompt = VectorRows(step.rows), PromptReads(step.rows)
        if vectors.has_any:
            pooled = self._steps.room_for(vectors.places(first_rows(step)))
            outcome = vectors.beside(self._draw(step, pooled), pooled.states, self._head)
        else:
            outcome = self._draw(step)
        if not prompt.num:
            return outcome
        with torch.inference_mode():
            places = prompt.places(first_rows(step))
            for begin in range(0, len(places), TILE_ROWS):
                prompt.take(self._steps.logits_of(places[begin : begin + TILE_ROWS]), begin, self._rows)
            return prompt.beside(outcome, prompt.lines())

    def _draw(self, step: RunnableStep, pooled: PooledRows | None = None) -> StepOutcome:
        draws = Draws(step.rows)
        columns, wants_logits = columns_of(step, draws.places), draws.wants_logits
        if not wants_logits and self._steps.collectives is None:
            # No tensor is made, so `inference_mode` is not needed: of 45 us of Python for a step of one row (its
            # kernels: 370 us), that and the objects for its draws were 15.
            return draws.on_host(None, self._steps.run(columns, wants_logits=False, pooled=pooled)[0])
        # Greedy rows use the head's own argmax: a row's logits are 608 kB at 151,936 words, to be written and read.
        with torch.inference_mode():
            likely, logits = self._steps.run(columns, wants_logits=wants_logits, pooled=pooled)
            return draws.on_host(logits, likely, self._rows)

    def logits(self, step: RunnableStep) -> dict[int, Tensor]:
        """Logits `[vocab]` of each row that samples, float32, by the row's index in the plan; for tests."""
        places = step.rows.drawing()
        with torch.inference_mode():
            _, logits = self._steps.run(columns_of(step, places), wants_logits=True)
        assert logits is not None
        return {step.rows.numbers[index]: logits[i] for i, index in enumerate(places)}


def columns_of(step: RunnableStep, places: Sequence[int]) -> Columns:
    """The step as the program takes it, with the logits, or most likely tokens, of the rows at the indices `places`."""
    rows, token_ids, firsts = step.rows, step.token_ids, step.rows.token_offsets
    starts, counts = rows.starts, rows.counts
    if not rows.is_whole and len(token_ids) != sum(counts):
        # Rows that could not be computed were left out of the step, but their tokens were not.
        firsts, token_ids = list(accumulate(counts[:-1], initial=0)), array("i")
        for offset, count in zip(rows.token_offsets, counts, strict=True):
            token_ids.extend(step.token_ids[offset : offset + count])
    spans = [0] * (4 * len(starts))
    spans[0::4], spans[1::4], spans[2::4], spans[3::4] = starts, counts, rows.page_offsets, firsts
    sampled = [firsts[index] + counts[index] - 1 for index in places]
    # Where all rows draw, as in decoding, no row is of an encoder.
    seconds = [] if rows.is_whole else [one.second_from for one in rows.found]
    return Columns(
        token_ids, _packed(spans), step.page_ids, _packed(sampled), _packed(seconds) if any(seconds) else None
    )


def first_rows(step: RunnableStep) -> list[int]:
    """Where each row's tokens begin in `columns_of`."""
    rows = step.rows
    if rows.is_whole or len(step.token_ids) == sum(rows.counts):
        return list(rows.token_offsets)
    return list(accumulate(rows.counts[:-1], initial=0))


def _packed(numbers: list[int]) -> "array[int]":
    """Packed by C code: `array` converts the numbers of a list one by one, which takes 50 us for 1,024 and not 23."""
    packed = array("i")
    packed.frombytes(struct.pack(f"={len(numbers)}i", *numbers))
    return packed
