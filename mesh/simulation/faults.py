"""The faults of a simulated network: how often, for how long, and the seeded dice that decide.

Pure; used by `mesh/simulation/network.py`. Generators are seeded with strings (`random.Random` digests them with
SHA-512), so nothing depends on PYTHONHASHSEED.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Faults:
    """Rates between 0 and 1 per message unless stated otherwise; durations are uniform between their bounds.

    drop        the message is lost
    duplicate   it arrives again, up to `duplicate_s` later
    slow        it takes up to `slow_s` longer; its channel waits behind it, other connections overtake it
    reset       its connection breaks, with everything in flight; both ends are told
    silent_down per end of a connection that breaks: that end is not told, or only `silent_s` later, as if by transport
                heartbeats
    partition   per pair of actors and window of `window_s`: the pair is cut for `partition_s`; the dice decide whether
                in both directions or one, and whether messages are lost or held until it ends
    """

    latency_s: tuple[float, float] = (50e-6, 200e-6)
    detection_s: float = 0.02
    drop: float = 0.0
    duplicate: float = 0.0
    duplicate_s: float = 0.5
    slow: float = 0.0
    slow_s: float = 0.1
    reset: float = 0.0
    silent_down: float = 0.0
    silent_s: float = float("inf")
    partition: float = 0.0
    window_s: float = 5.0
    partition_s: tuple[float, float] = (0.05, 2.0)


class Dice:
    """A seeded source of one conversation's faults; its generator is created when first needed."""

    __slots__ = ("_name", "_random")

    def __init__(self, name: str) -> None:
        self._name = name
        self._random: random.Random | None = None

    def happens(self, rate: float) -> bool:
        """True with probability `rate`; a rate of 0 draws nothing."""
        return rate > 0.0 and self._draw() < rate

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._draw()

    def _draw(self) -> float:
        if self._random is None:
            self._random = random.Random(self._name)
        return self._random.random()


class Cut(NamedTuple):
    """Actor ids of `left` and `right` cannot reach each other (`one_way`: left cannot reach right) until `until_s`."""

    left: frozenset[str]
    right: frozenset[str]
    until_s: float
    hold: bool
    one_way: bool = False

    def parts(self, sender: str, receiver: str) -> bool:
        if sender in self.left and receiver in self.right:
            return True
        return not self.one_way and sender in self.right and receiver in self.left


class RandomCuts:
    """Which pairs are cut when: a function of seed, pair and time window, so it needs no timers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: dict[tuple[str, str], tuple[int, float, Cut | None]] = {}

    def find(self, faults: Faults, sender: str, receiver: str, now: float) -> Cut | None:
        window = int(now / faults.window_s)
        pair = (sender, receiver) if sender < receiver else (receiver, sender)
        known = self._drawn.get(pair)
        if known is None or known[0] != window:
            known = self._drawn[pair] = (window, *self._draw(faults, pair, window))
        _, begins, cut = known
        if cut is None or not begins <= now < cut.until_s:
            return None
        return cut if cut.parts(sender, receiver) else None

    def _draw(self, faults: Faults, pair: tuple[str, str], window: int) -> tuple[float, Cut | None]:
        dice = Dice(f"{self._seed}/cut/{pair[0]}/{pair[1]}/{window}")
        if not dice.happens(faults.partition):
            return 0.0, None
        begins = (window + dice.between(0.0, 1.0)) * faults.window_s
        # A cut ends with its window at the latest, so that checking one window is enough.
        until = min(begins + dice.between(*faults.partition_s), (window + 1) * faults.window_s)
        left, right = pair if dice.happens(0.5) else (pair[1], pair[0])
        one_way = dice.happens(0.5)
        return begins, Cut(frozenset([left]), frozenset([right]), until, dice.happens(0.5), one_way)
