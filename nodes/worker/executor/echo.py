"""The model `echo`: answers with its prompt, read from the KV pages, so that a wrong page gives a wrong answer.

Every position stores its token id in the page's K cell and its own position in the V cell. Output token number j is the
prompt token that the pages hold for position j; after the prompt comes the end token, then the prompt again (a caller
that ignores the end token sees the prompt repeated). A token that must not be drawn (mask and floor of the row's edits)
is replaced by the next one in this cycle that may be drawn, or by the lowest allowed id if the cycle has none; it then
counts as certain. The state at a position, for vectors, is four numbers: its token, the position, their product, 1. A
stored position with a wrong value is reported as `corrupt_page`. With `fatal_token` it simulates a
request that kills its worker. Needs neither torch nor numpy; used by tests, simulations and benchmarks of everything
but the model.
"""

import os
import signal
from array import array
from collections.abc import Iterable
from typing import Final

from typing_extensions import override

from kvstore.layout import KVLayout
from mesh.transport.base import Buffer
from nodes.asks.edits import RowEdits
from nodes.model_spec import EchoTimings
from nodes.protocol import RowError
from nodes.request import TOKENS
from nodes.worker.draw.edits import LEFT_NOTHING, NOTHING_LEFT, edits_of, first_allowed
from nodes.worker.draw.reads import certain, echoed
from nodes.worker.steps.step import CORRUPT_PAGE, RunnableRow, RunnableStep, Runner, StepOutcome

_WORD_BYTES: Final = 4
"""A u32: token id in the K cell, position in the V cell."""


class EchoRunner(Runner):
    """Runs the echo model on `pages`, the writable bytes of a pool of `layout`.

    Raises ValueError if the layout is not one 4-byte cell for K and for V of a token.
    """

    def __init__(self, pages: Buffer, layout: KVLayout, eos_token_id: int, timings: EchoTimings) -> None:
        if layout.token_bytes != 2 * _WORD_BYTES:
            raise ValueError(f"the echo model stores 8 bytes per token, not {layout.token_bytes}")
        self.numerics = "echo"
        self._words = memoryview(pages).cast("B").cast("I")
        self._page_size = layout.page_size
        self._page_words = layout.page_bytes // _WORD_BYTES
        self._eos_token_id = eos_token_id
        self._timings = timings
        self._positions = memoryview(array("I"))

    @override
    def run(self, step: RunnableStep) -> StepOutcome:
        """The outcome's delay is the configured time of a step, which is not spent here."""
        if (drawn := self._decode(step)) is not None:
            return StepOutcome(drawn, [], self._delay_s(len(drawn)))
        token_ids: list[int] = []
        errors: list[RowError] = []
        extras: list[bytes] = []
        prompt_extras: list[bytes] = []
        num_tokens, makes_vectors = 0, False
        for row in step.rows:
            num_tokens += row.num_tokens
            if self._timings.fatal_token >= 0:
                self._die_of(row, step)
            edits = edits_of(row) if row.draws else None
            problem = self._compute(row, step, edits)
            if problem:
                edits = RowError(row.row, CORRUPT_PAGE, problem)
            makes_vectors |= row.sequence.kind != TOKENS
            token_id = -1
            if row.draws and not isinstance(edits, RowError):
                token_id = self._answer(row, edits, step.page_ids)
                if token_id < 0:
                    edits = RowError(row.row, NOTHING_LEFT, LEFT_NOTHING, retryable=False)
            if isinstance(edits, RowError):
                errors.append(edits)
            token_ids.append(token_id)
            reads = row.sequence.reads
            extras.append(b"" if reads is None or token_id < 0 else certain(token_id, reads))
            prompt_extras.append(b"" if isinstance(edits, RowError) else self._read(row, step.page_ids))
        beside = [some if any(some) else () for some in (extras, prompt_extras)]
        outcome = StepOutcome(token_ids, errors, self._delay_s(num_tokens), "", *beside)
        return self._pooled(step, outcome) if makes_vectors else outcome

    def _delay_s(self, num_tokens: int) -> float:
        return (self._timings.step_ms * 1e3 + self._timings.token_us * num_tokens) * 1e-6

    def _decode(self, step: RunnableStep) -> list[int] | None:
        """What the rows draw, if each has one token and nothing is asked beside its draw; None: look at each row.

        This only detects that a page is wrong; `_compute` writes the same again, and says what. By columns, as a row
        and what may be asked of it took 9 us, and this takes 2.
        """
        rows, page_ids, words, size, page_words = (
            step.rows, step.page_ids, self._words, self._page_size, self._page_words,
        )  # fmt: skip
        if not rows.is_whole or len(step.token_ids) != len(rows) or self._timings.fatal_token >= 0:
            return None
        if [one for one in rows.found if one.is_edited or one.reads is not None or one.kind != TOKENS]:
            return None
        positions = self._positions_to(1 + max(rows.starts))
        drawn: list[int] = []
        columns = zip(rows.found, rows.starts, rows.page_offsets, step.token_ids, strict=True)
        for one, start, offset, token_id in columns:
            num_prompt, end = one.num_prompt_tokens, start + 1
            page = page_ids[offset + start // size] * page_words
            words[page + start % size], words[page + start % size + size] = token_id, start
            answer = (end - num_prompt) % (num_prompt + 1)
            index = min(answer, start) // size
            begin, first, last = page_ids[offset + index] * page_words, index * size, min((index + 1) * size, end)
            if words[begin + size : begin + size + last - first] != positions[first:last]:
                return None
            if self._is_due(end, num_prompt) and self._misplaced(range(-(-end // size)), end, offset, page_ids):
                return None
            drawn.append(self._eos_token_id if answer == num_prompt else words[begin + answer - first])
        return drawn

    def _pooled(self, step: RunnableStep, outcome: StepOutcome) -> StepOutcome:
        # Here, so that a mesh that makes no vectors starts without numpy.
        import numpy as np

        from nodes.worker.vectors.pooling import VectorRows

        vectors, states, firsts = VectorRows(step.rows), list[tuple[int, ...]](), list[int]()
        for row in step.rows:
            firsts.append(len(states))
            for position in range(row.start, row.end):
                token = self._token_in(position, row.page_offset, step.page_ids)
                states.append((token, position, token * position, 1))
        return vectors.beside(
            outcome, np.array([states[at] for at in vectors.places(firsts)], np.float32).reshape(-1, 4)
        )

    def _die_of(self, row: RunnableRow, step: RunnableStep) -> None:
        if self._timings.fatal_token in step.token_ids[row.token_offset : row.token_offset + row.num_tokens]:
            os.kill(os.getpid(), signal.SIGKILL)

    def _compute(self, row: RunnableRow, step: RunnableStep, edits: RowEdits | RowError | None) -> str:
        """Write the row's tokens. Returns what is wrong with the pages that it builds on; empty if nothing is.

        All pages are checked when a sequence is first read here (a prefill, the steps after a handoff), whenever a page
        fills up, and while its draws are edited; in other steps only the page that the answer is read from is checked.
        """
        start, count, token_offset, page_offset, history = (
            row.start, row.num_tokens, row.token_offset, row.page_offset, row.history,
        )  # fmt: skip
        words, size, page_ids, num_prompt = self._words, self._page_size, step.page_ids, row.sequence.num_prompt_tokens
        end = start + count
        token_ids, positions = memoryview(step.token_ids).cast("B").cast("I"), self._positions_to(end)
        for index in range(start // size, -(-end // size)):
            # Page by page: a prompt of 123 tokens takes 20 us, token by token it took 36.
            first, last = max(start, index * size), min(end, (index + 1) * size)
            cell, at = page_ids[page_offset + index] * self._page_words + first % size, token_offset + first - start
            words[cell : cell + last - first] = token_ids[at : at + last - first]
            words[cell + size : cell + size + last - first] = positions[first:last]
        if count > 1 or edits is not None or self._is_due(end, num_prompt):
            indices = range(-(-end // size))
        else:
            indices = (min((end - num_prompt) % (num_prompt + 1), end - 1) // size,)
        if problem := self._misplaced(indices, end, page_offset, page_ids):
            return problem
        if history is not None:
            held = [self._token_in(position, page_offset, page_ids) for position in range(end)]
            if held != list(history):
                return (
                    f"the pages of this sequence do not hold the {len(history)} tokens that its sampling looks back at"
                )
        return ""

    def _is_due(self, end: int, num_prompt: int) -> bool:
        """Whether all pages of a row that decodes are checked."""
        return end - num_prompt <= 1 or end % self._page_size == 0

    def _misplaced(self, indices: Iterable[int], end: int, page_offset: int, page_ids: "array[int]") -> str:
        """What is wrong with these pages of a sequence that has `end` positions, in words; empty if nothing is."""
        size, positions = self._page_size, self._positions_to(end)
        for index in indices:
            page, first, last = page_ids[page_offset + index], index * size, min((index + 1) * size, end)
            begin = page * self._page_words + size
            if self._words[begin : begin + last - first] != positions[first:last]:
                return f"page {page} does not hold positions {first} to {last - 1} of this sequence"
        return ""

    def _read(self, row: RunnableRow, page_ids: "array[int]") -> bytes:
        """What the row's sequence wants to know of its prompt."""
        one = row.sequence
        if one.prompt_reads is None:
            return b""
        ends = range(row.start, min(row.end, one.num_prompt_tokens - 1))
        before = [self._token_in(position, row.page_offset, page_ids) for position in ends]
        said = zip(ends, before, strict=True)
        return b"".join(echoed(at + 1, token, one.prompt_ids[at + 1], one.prompt_reads) for at, token in said)

    def _positions_to(self, end: int) -> memoryview:
        """0, 1, 2, ... in the form of the pages, so that slices compare without an object for each number."""
        if len(self._positions) < end:
            self._positions = memoryview(array("I", range(2 * end)))
        return self._positions

    def _answer(self, row: RunnableRow, edits: RowEdits | None, page_ids: "array[int]") -> int:
        """The token that the row draws; -1: none is allowed."""
        num_prompt, offset = row.sequence.num_prompt_tokens, row.page_offset
        first = row.output_position % (num_prompt + 1)
        if edits is None or (edits.mask is None and not edits.floor):
            return self._eos_token_id if first == num_prompt else self._token_in(first, offset, page_ids)
        # The cycle: the prompt's tokens, then the end token. It is searched from the current one on.
        answers = [*(self._token_in(one, offset, page_ids) for one in range(num_prompt)), self._eos_token_id]
        return first_allowed([*answers[first:], *answers[:first]], edits)

    def _token_in(self, position: int, page_offset: int, page_ids: "array[int]") -> int:
        """The token that the pages from `page_offset` on hold for a position."""
        page = page_ids[page_offset + position // self._page_size]
        return self._words[page * self._page_words + position % self._page_size]
