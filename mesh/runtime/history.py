"""The last ten minutes of a few figures of one actor, in memory: nobody has to watch for them to be there. Pure."""

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from mesh.wire.frames import History

EVERY_S: Final = 5.0
"""Ten heartbeats: what is drawn over ten minutes on a thousand pixels shows no more."""
NUM_KEPT: Final = 120
"""Ten minutes; of six figures some 30 KB."""


class _Sample(NamedTuple):
    at: float
    figures: dict[str, float]


class FigureHistory:
    """Samples of one incarnation, numbered from 1; the oldest go. Times are of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=NUM_KEPT)
        self._number = 0
        self._seen: dict[str, tuple[int, float]] = {}

    def is_due(self, now: float) -> bool:
        return not self._samples or now >= self._samples[-1].at + EVERY_S

    def add(self, now: float, figures: Mapping[str, float], observed: Mapping[str, tuple[int, float]]) -> None:
        """Keep `figures`, and of what is `observed` (how often, and the sum) the mean of what came since the last time.
        What was not observed meanwhile is absent from this sample.
        """
        means: dict[str, float] = {}
        for name, (count, total) in observed.items():
            count_before, total_before = self._seen.get(name, (0, 0.0))
            # Of nothing there is no mean, and a 0 would be drawn as an answer without any delay.
            if count > count_before:
                means[name] = (total - total_before) / (count - count_before)
        self._seen = dict(observed)
        self._samples.append(_Sample(now, {**figures, **means}))
        self._number += 1

    def after(self, number: int, now: float) -> History:
        """The samples later than `number` that are still there."""
        # A reader may ask for more than is kept, or have a number of another incarnation.
        num = min(max(0, self._number - number), len(self._samples))
        chosen = list(self._samples)[len(self._samples) - num :]
        # In columns: the names of six figures, 120 times over, would be most of an answer.
        names = sorted({name for sample in chosen for name in sample.figures})
        return History(
            number=self._number,
            ages_s=[round(now - sample.at, 3) for sample in chosen],
            columns={name: [sample.figures.get(name, -1.0) for sample in chosen] for name in names},
        )
