"""How long so much of something takes, as far as earlier times tell: tokens to prefill, pages to read from a disk.

Pure.
"""

import math
from typing import Final

FADING: Final = 0.8
"""What five observations ago was seen counts a third: a disk that another program has begun to use is known soon."""


class LearnedRate:
    """Amounts over seconds, both fading with each observation; large amounts count for more, as they tell more."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`; 0 if nothing came in that time."""
        # A number off the wire: one NaN or infinity would make every later estimate one too.
        if amount >= 0 and math.isfinite(seconds) and seconds > 0:
            self._amount = FADING * self._amount + amount
            self._seconds = FADING * self._seconds + seconds

    @property
    def per_second(self) -> float:
        """0.0 while nothing is known."""
        return self._amount / self._seconds if self._seconds else 0.0

    def seconds(self, amount: float) -> float | None:
        """How long `amount` would take: infinity if nothing ever came. None while nothing is known."""
        if not self._seconds:
            return None
        return amount * self._seconds / self._amount if self._amount else math.inf
