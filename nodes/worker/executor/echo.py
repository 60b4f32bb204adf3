"""The model `echo`: answers with its prompt, out of the KV pages, so that a wrong page is a wrong answer.

Every position stores its token id in the page's K cell and its own position in the V cell. Output token number j is the
prompt token that the pages hold for position j; when the prompt is through comes the end token, then the prompt again
(whoever ignores the end token sees the prompt repeated). Instead of a token that must not be drawn yet
(`Sampling.masked_token_ids`) comes the next in this round that may be; if none may, the lowest id that may. A stored
position that is not what it should be is reported as `corrupt_page`. With a `fatal_token` it plays the request that
kills its worker. Needs neither torch nor numpy; used by tests, simulations and benchmarks of everything but the model.
"""

import os
import signal
from array import array
from itertools import chain, count
from typing import Final

from kvstore.layout import KVLayout
from mesh.transport.base import Buffer
from nodes.model_spec import EchoTimings
from nodes.protocol import RowError
from nodes.worker.steps.step import CORRUPT_PAGE, RunnableRow, RunnableStep, StepOutcome

_WORD_BYTES: Final = 4


class EchoRunner:
    """Runs the echo model on `pages`, the writable bytes of a pool of `layout`.

    Raises ValueError if the layout is not one 4-byte cell for K and for V of a token.
    """

    def __init__(self, pages: Buffer, layout: KVLayout, eos_token_id: int, timings: EchoTimings) -> None:
        if layout.token_bytes != 2 * _WORD_BYTES:
            raise ValueError(f"the echo model keeps 8 bytes a token, not {layout.token_bytes}")
        self.numerics = "echo"
        self._words = memoryview(pages).cast("B").cast("I")
        self._page_size = layout.page_size
        self._page_words = layout.page_bytes // _WORD_BYTES
        self._eos_token_id = eos_token_id
        self._timings = timings
        self._positions = memoryview(array("I"))

    def run(self, step: RunnableStep) -> StepOutcome:
        """See `Runner.run`; the delay is the configured time of a step, not spent here."""
        token_ids: list[int] = []
        errors: list[RowError] = []
        num_tokens = 0
        for row in step.rows:
            num_tokens += row.num_tokens
            self._die_of(row, step)
            self._write(row, step)
            problem = self._problem(row, step)
            if problem:
                errors.append(RowError(row.row, CORRUPT_PAGE, problem))
            token_ids.append(-1 if problem or row.sampling is None else self._answer(row, step))
        delay_s = (self._timings.step_ms * 1e3 + self._timings.token_us * num_tokens) * 1e-6
        return StepOutcome(token_ids, errors, delay_s)

    def _die_of(self, row: RunnableRow, step: RunnableStep) -> None:
        fatal = self._timings.fatal_token
        if fatal >= 0 and fatal in step.token_ids[row.token_offset : row.token_offset + row.num_tokens]:
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, row: RunnableRow, step: RunnableStep) -> None:
        for position in range(row.start, row.end):
            cell = self._cell(row, step, position)
            self._words[cell] = step.token_ids[row.token_offset + position - row.start]
            self._words[cell + self._page_size] = position

    def _problem(self, row: RunnableRow, step: RunnableStep) -> str:
        """What is wrong with the pages that the row builds on.

        All of them where a sequence begins to be read here (a prefill, the steps after a handoff) and whenever a page
        fills up; in the steps between only the page that the answer is read from.
        """
        end, size, position = row.end, self._page_size, row.output_position
        is_masked = row.sampling is not None and position < row.sampling.min_tokens
        if row.num_tokens > 1 or position <= 1 or end % size == 0 or is_masked:
            pages = range(-(-end // size))
        else:
            pages = (min(position % (row.num_prompt_tokens + 1), end - 1) // size,)
        positions = self._positions_to(end)
        for index in pages:
            first, last = index * size, min((index + 1) * size, end)
            page = step.page_ids[row.page_offset + index]
            begin = page * self._page_words + size
            if self._words[begin : begin + last - first] != positions[first:last]:
                return f"page {page} does not hold positions {first} to {last - 1} of this sequence"
        if row.history is None:
            return ""
        held = [self._token_in(position, row, step) for position in range(end)]
        if held != list(row.history):
            return f"its pages do not hold the {len(row.history)} tokens that its sampling looks back at"
        return ""

    def _positions_to(self, end: int) -> memoryview:
        """0, 1, 2, ... as the pages hold them: slices are compared without an object for each number."""
        if len(self._positions) < end:
            self._positions = memoryview(array("I", range(2 * end)))
        return self._positions

    def _answer(self, row: RunnableRow, step: RunnableStep) -> int:
        first = row.output_position % (row.num_prompt_tokens + 1)
        sampling = row.sampling
        if sampling is None or row.output_position >= sampling.min_tokens or not sampling.masked_token_ids:
            return self._token_at(first, row, step)
        masked = frozenset(sampling.masked_token_ids)
        for position in chain(range(first, row.num_prompt_tokens + 1), range(first)):
            if (token_id := self._token_at(position, row, step)) not in masked:
                return token_id
        return next(token_id for token_id in count() if token_id not in masked)

    def _token_at(self, position: int, row: RunnableRow, step: RunnableStep) -> int:
        """The prompt's token at a position, and the end token behind it."""
        if position == row.num_prompt_tokens:
            return self._eos_token_id
        return self._token_in(position, row, step)

    def _token_in(self, position: int, row: RunnableRow, step: RunnableStep) -> int:
        return self._words[self._cell(row, step, position)]

    def _cell(self, row: RunnableRow, step: RunnableStep, position: int) -> int:
        page = step.page_ids[row.page_offset + position // self._page_size]
        return page * self._page_words + position % self._page_size
