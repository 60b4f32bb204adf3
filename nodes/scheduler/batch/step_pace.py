"""How many prompt tokens may join the decode rows of a step, by how long earlier steps took.

    decode  seconds of a step of so many rows, each of one token
    token   seconds that each further prompt token adds
    room    (max_step_s - decode) / token, in whole pages, at least one
    took    seconds that steps of so many decode rows took, whatever they were

A burst of prompts is then spread over steps that last about `max_step_s`, and readers of streams see gaps of that
length, not of the whole burst. If nothing decodes, nothing is held up, and steps are as large as they may be.
The idea is that of the token budget of chunked prefill (Sarathi-Serve, Agrawal et al. 2024), a number of tokens that is
measured for a machine beforehand; here it is measured while running. Pure; owned by the pipeline.
"""

import math
from typing import Final

NEWEST: Final = 0.25
"""Weight of the newest measurement. Costs of a token grow with its context, over hundreds of steps; a step that a
neighbour made four times as long counts as 1.75 times as long, and is half forgotten after two more."""
AT_MOST: Final = 4.0
"""A measurement counts as at most so many times the known value: a hang of a second is not a cost of tokens."""


class StepPace:
    """Learns from the times of steps; holds one number for each power of two of rows, and one for prompt tokens."""

    def __init__(self, max_step_s: float, page_size: int) -> None:
        self._max_step_s = max_step_s
        self._page_size = page_size
        self._decode_s: dict[int, float] = {}
        self._took_s: dict[int, float] = {}
        self._token_s = 0.0

    def observe(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """A step has ended after `elapsed_s`; `num_tokens - num_rows` of its tokens count as prompt tokens."""
        if not (math.isfinite(elapsed_s) and elapsed_s >= 0 and num_rows > 0):
            return
        if num_tokens == num_rows:
            # A step of less than the clock's resolution, a millisecond, takes 0: that says that it is short, and
            # nothing of how much longer others are.
            size = num_rows.bit_length()
            known = self._took_s.get(size, elapsed_s)
            self._took_s[size] = known + NEWEST * (elapsed_s - known)
        if not elapsed_s:
            return
        # A chunk's row counts as a decode row here: that is one token of at least a page too few, far below the noise.
        num_prompt = num_tokens - num_rows
        if num_prompt <= 0:
            size = num_rows.bit_length()
            self._decode_s[size] = _moved(self._decode_s.get(size, 0.0), elapsed_s)
        elif num_prompt >= self._page_size:
            # With fewer tokens, most of the difference would be noise.
            added_s = max(elapsed_s - self._decode(num_rows), 0.0)
            self._token_s = _moved(self._token_s, added_s / num_prompt)

    def prompt_tokens(self, num_decoding: int) -> int | None:
        """How many prompt tokens may join a step of so many decoding rows; None: as many as there is room for."""
        # Nothing was measured yet: one step of full size will be.
        if not self._max_step_s or not num_decoding or not self._token_s:
            return None
        room = int((self._max_step_s - self._decode(num_decoding)) / self._token_s)
        # At least a page, however slow the rows are: prompts must make progress, and chunks end on pages.
        return max(room // self._page_size, 1) * self._page_size

    def steps_within(self, seconds: float, num_decoding: int, most: int) -> int:
        """How many steps of so many decoding rows end within these seconds, at most `most`; 1 if none was seen yet."""
        took_s = self._took_s.get(num_decoding.bit_length())
        if took_s is None:
            return 1
        return max(1, min(most, int(seconds / took_s))) if took_s * most > seconds else most

    def _decode(self, num_rows: int) -> float:
        """Seconds of the nearest size measured: reading the weights is most of a small step, however many rows."""
        size = num_rows.bit_length()
        if not self._decode_s:
            return 0.0
        return self._decode_s[min(self._decode_s, key=lambda known: (abs(known - size), known))]


def _moved(known: float, newest: float) -> float:
    return known + NEWEST * (min(newest, AT_MOST * known) - known) if known else newest
