"""What a step's rows make of their last hidden states: which states are read, and each row's vector or what goes on.

    last   the state at the last position                      read by the row that ends the prompt
    mean   the sum of all states, position after position,
           divided by their number                             read by every row; the sum so far goes on
    cls    the state at the first position                     read by the first row, and goes on to the last

Sums are of float32 numbers and begin at the first position, so a vector has the same bits however its prompt is cut
into rows. What goes on is kept with the sequence by position, and told to the scheduler for a worker that is to
continue: a step that is sent again finds what it found the first time.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nodes.protocol import RowError
from nodes.request import TOKENS
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import MISSING_INPUT, POISONED, Rows, StepOutcome

Floats: TypeAlias = npt.NDArray[np.float32]
Head: TypeAlias = Callable[[Floats], Floats]
"""What comes behind the pooling: one vector, `[hidden]`, becomes another one."""


def no_head(vector: Floats) -> Floats:
    """The vector itself."""
    return vector


class VectorRows:
    """The states that a step's rows read, one row's after the other's."""

    __slots__ = ("_rows", "_spans", "num")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._spans: list[tuple[int, int, int]] = []
        """The index of each row of a vector, the first of its positions that is read (counted in it), and how many."""
        self.num = 0
        # Where all rows draw, as in decoding, there is none: they are not looked at.
        if rows.is_whole:
            return
        for index, (one, start, count) in enumerate(zip(rows.found, rows.starts, rows.counts, strict=True)):
            if one.kind != TOKENS:
                first, num = _read_by(one, start, count)
                self._spans.append((index, first, num))
                self.num += num

    @property
    def has_any(self) -> bool:
        """Whether a row belongs to a vector; it may read nothing yet."""
        return bool(self._spans)

    def places(self, firsts: Sequence[int]) -> "array[int]":
        """The batch's rows whose states are read; row `index` of the step begins at `firsts[index]` there."""
        return array("i", [firsts[index] + first + at for index, first, num in self._spans for at in range(num)])

    def beside(self, outcome: StepOutcome, states: Floats, head: Head = no_head) -> StepOutcome:
        """The outcome of the step with the rows' vectors, from the states at `places`, float32 `[places, hidden]`."""
        if not self._spans:
            return outcome
        vectors, errors, end = [b""] * len(self._rows), list(outcome.errors), 0
        for index, _, num in self._spans:
            begin, end = end, end + num
            made = self._made(index, states[begin:end], head)
            if isinstance(made, RowError):
                errors.append(made)
            else:
                vectors[index] = made
        return outcome._replace(vectors=vectors, errors=errors)

    def _made(self, index: int, states: Floats, head: Head) -> bytes | RowError:
        rows = self._rows
        one, start, count, number = rows.found[index], rows.starts[index], rows.counts[index], rows.numbers[index]
        before, end = one.carried_to(start), start + count
        if before is None:
            return RowError(number, MISSING_INPUT, f"what was pooled of the first {start} positions is not known here")
        pooled = _pooled(one, np.frombuffer(before, np.float32), states)
        if end < one.num_prompt_tokens:
            after = b"" if one.kind == "last" else pooled.tobytes()
            one.carry(start, before, end, after)
            return after
        vector = head(pooled / np.float32(one.num_prompt_tokens) if one.kind == "mean" else pooled)
        if not np.isfinite(vector).all():
            # Only the sequence's own input can make its numbers overflow: rows do not mix.
            return RowError(number, POISONED, "the model's vector is not finite", retryable=False)
        one.carry(start, before, end, b"")
        return vector.astype("<f4").tobytes()


def _read_by(one: OpenSequence, start: int, count: int) -> tuple[int, int]:
    """The first position, counted in the row, whose state is read, and how many are."""
    if one.kind == "mean":
        return 0, count
    if one.kind == "cls":
        return 0, int(start == 0)
    return count - 1, int(start + count == one.num_prompt_tokens)


def _pooled(one: OpenSequence, before: Floats, states: Floats) -> Floats:
    """The state that is taken, or the sum of all states so far, `[hidden]`; nothing if none has come."""
    if one.kind != "mean":
        return states[0] if len(states) else before
    if not len(states):
        return before
    # Not `sum`, which adds in pairs where it can, and then by the number of rows.
    return np.add.accumulate(np.concatenate((before[np.newaxis], states)) if len(before) else states, axis=0)[-1]
