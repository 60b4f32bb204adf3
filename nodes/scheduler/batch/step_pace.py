"""How many prompt tokens may join a step beside those that decode, by what steps took.

    decode  seconds of a step of so many rows, each of one token
    token   seconds that each prompt token more adds
    room    max_step_s - decode, over token: in whole pages, at least one

A burst of prompts is then spread over steps that last about `max_step_s`, and who reads a stream sees gaps of that
length, not of the whole burst. Where nobody decodes there is nobody to hold up, and steps are as large as they may be.
The same idea as the token budget of chunked prefill (Sarathi-Serve, Agrawal et al. 2024), which is a number of tokens
that somebody measured for the machine; here it is measured as it runs. Pure; owned by the pipeline.
"""

import math
from typing import Final

NEWEST: Final = 0.25
"""Share of the newest measurement. Costs of a token grow with its context, over hundreds of steps; a step that a
neighbour slowed down by four counts as one of 1.75, and is forgotten by half after two more."""
AT_MOST: Final = 4.0
"""A measurement counts as no more than so many times what was known: a hang of a second is no cost of tokens."""


class StepPace:
    """Takes in what steps took; holds one number for each power of two of rows, and one for prompt tokens."""

    def __init__(self, max_step_s: float, page_size: int) -> None:
        self._max_step_s = max_step_s
        self._page_size = page_size
        self._decode_s: dict[int, float] = {}
        self._token_s = 0.0

    def took(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """A step has ended after `elapsed_s`; `num_tokens - num_rows` of its tokens are taken for those of prompts."""
        if not (math.isfinite(elapsed_s) and elapsed_s > 0 and num_rows > 0):
            return
        # A row of a chunk counts as a decode row here: one token too few of at least a page, well below the noise.
        num_prompt = num_tokens - num_rows
        if num_prompt <= 0:
            size = num_rows.bit_length()
            self._decode_s[size] = _moved(self._decode_s.get(size, 0.0), elapsed_s)
        elif num_prompt >= self._page_size:
            # Of fewer tokens the noise of the rest would be most of the difference.
            added_s = max(elapsed_s - self._decode(num_rows), 0.0)
            self._token_s = _moved(self._token_s, added_s / num_prompt)

    def prompt_tokens(self, num_decoding: int) -> int | None:
        """What may join a step of so many decoding rows; None: as many as there is room for."""
        # Nothing measured: one step of full size teaches it.
        if not self._max_step_s or not num_decoding or not self._token_s:
            return None
        room = int((self._max_step_s - self._decode(num_decoding)) / self._token_s)
        # A page at least, however slow the rows are: prompts must get on, and chunks end on pages.
        return max(room // self._page_size, 1) * self._page_size

    def _decode(self, num_rows: int) -> float:
        """Of the nearest size that was measured: reading the weights is most of a small step, whatever the rows."""
        size = num_rows.bit_length()
        if not self._decode_s:
            return 0.0
        return self._decode_s[min(self._decode_s, key=lambda one: (abs(one - size), one))]


def _moved(known: float, newest: float) -> float:
    return known + NEWEST * (min(newest, AT_MOST * known) - known) if known else newest
