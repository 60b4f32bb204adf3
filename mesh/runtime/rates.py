"""How fast an actor's totals rise: the mean rate over the last seconds. Pure.

Sampled with every heartbeat, so that rates are available at once, and are the same for everyone who asks.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOW_S: Final = 10.0
"""20 heartbeats: in less, one burst would look like a rate; in more, `ps` would show load that has ended."""


class Rates:
    """Rates of totals that only rise, by name. Holds one sample for each heartbeat in the window."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def sample(self, now: float, totals: Mapping[str, float]) -> None:
        self._samples.append((now, dict(totals)))
        # The last sample before the window marks its beginning.
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def per_second(self, now: float, totals: Mapping[str, float]) -> dict[str, float]:
        """The rate of each total, given its value at `now`; 0 if nothing is known yet."""
        if not self._samples or now <= self._samples[0][0]:
            return dict.fromkeys(totals, 0.0)
        at, before = self._samples[0]
        return {name: (total - before.get(name, 0.0)) / (now - at) for name, total in totals.items()}
