"""How fast totals of this actor rise: the mean of the last seconds. Pure.

Sampled with every heartbeat, so whoever asks for a figure gets one at once, and all who ask get the same.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOW_S: Final = 10.0


class Rates:
    """Of totals that only rise, by name. Holds as many samples as heartbeats are in the window."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def sample(self, now: float, totals: Mapping[str, float]) -> None:
        """What the totals are at `now`, seconds."""
        self._samples.append((now, dict(totals)))
        # The last one before the window is where it begins.
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def per_second(self, now: float, totals: Mapping[str, float]) -> dict[str, float]:
        """Of each total as it is at `now`; 0 where nothing is known yet."""
        if not self._samples or now <= self._samples[0][0]:
            return dict.fromkeys(totals, 0.0)
        at, before = self._samples[0]
        return {name: (total - before.get(name, 0.0)) / (now - at) for name, total in totals.items()}
