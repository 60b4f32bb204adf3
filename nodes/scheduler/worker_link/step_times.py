"""How long a step may take before it counts as hung, by how long earlier steps took.

    work      tokens of the step, each position of a prompt that is read once more, plus the positions that they attend
              to, `POSITIONS_PER_TOKEN` of which make a token
    measured  the slowest recent step of about the same work, or of less work, scaled up
    deadline  `DEADLINE_FACTOR` times that, at least `step_deadline_s`

A size not seen yet gets no more than `step_deadline_s + token_deadline_s * tokens`, which is also the deadline before
anything was measured: wide enough for the slowest host, and 17 minutes for 2,048 tokens. Pure; owned by the pipeline.
"""

import math
from typing import Final

from nodes.scheduler.config import SchedulerConfig

DEADLINE_FACTOR: Final = 10.0
"""A neighbour on the same cores makes a step 2 to 4 times as long, a cold cache or a first shape as much again."""
POSITIONS_PER_TOKEN: Final = 4096
"""Attention over so many positions costs what a token's linear layers cost, or less, in models of 0.5 to 8 billion
parameters (0.6e9: 1.2 GFlop a token, 0.23 MFlop a position). In smaller ones all steps are far below the least
deadline."""
FADING: Final = 0.99
"""The slowest step's time fades to half in 69 faster steps."""


class StepTimes:
    """Learns from the times of steps how long the next may take. Sizes are powers of two, so it holds few numbers."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._page_size = config.page_size
        self._step_deadline_s = config.step_deadline_s
        self._token_deadline_s = config.token_deadline_s
        self._slowest_s: dict[int, float] = {}

    def observe(self, num_rows: int, num_tokens: int, num_pages: int, elapsed_s: float) -> None:
        """A step of this size has ended after `elapsed_s`, by its worker's account."""
        # It is a number off the wire: one NaN or infinity would make every later deadline of that size one too.
        if not (math.isfinite(elapsed_s) and elapsed_s > 0):
            return
        # Sizes by powers of two: some 20 numbers hold all steps, and a factor of two is far within `DEADLINE_FACTOR`.
        size = self._work(num_rows, num_tokens, num_pages).bit_length()
        self._slowest_s[size] = max(elapsed_s, FADING * self._slowest_s.get(size, 0.0))

    def timeout_s(self, num_rows: int, num_tokens: int, num_pages: int) -> float:
        """How many seconds a step of this size may take, from its turn on, before it counts as hung."""
        most_s = self._step_deadline_s + self._token_deadline_s * num_tokens
        work = self._work(num_rows, num_tokens, num_pages)
        size = work.bit_length()
        # A measurement counts even above `most_s`: a host where such a step took so long must be allowed to finish it.
        if size in self._slowest_s:
            return max(self._step_deadline_s, DEADLINE_FACTOR * self._slowest_s[size])
        smaller = max((known for known in self._slowest_s if known < size), default=0)
        if smaller:
            # For all that is known, it was the least work of that size that took so long.
            expected_s = self._slowest_s[smaller] * work / (1 << smaller - 1)
        elif self._slowest_s:
            # Only larger steps were seen, and less work takes no longer than they did.
            expected_s = self._slowest_s[min(self._slowest_s)]
        else:
            return most_s
        return min(most_s, max(self._step_deadline_s, DEADLINE_FACTOR * expected_s))

    def _work(self, num_rows: int, num_tokens: int, num_pages: int) -> int:
        """Assumes that rows are alike: exact for one prompt alone and for decoding, which are the extremes."""
        attended = num_tokens * num_pages * self._page_size // max(1, num_rows * POSITIONS_PER_TOKEN)
        return max(1, num_tokens + attended)
