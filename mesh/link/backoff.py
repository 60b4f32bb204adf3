"""Pauses between dials of an incarnation that could not be reached. Pure; owned by `mesh/link/handshake.py`.

Without them every message to a member that is dead, but not yet known to be, would dial it again.
"""

from collections import OrderedDict
from typing import Final

from mesh.address import Address

_MAX_REMEMBERED: Final = 1024
"""The oldest goes: its peer is dialed once without a pause. 1,024 are about 200 KB, and deaths come by the dozen."""
_FORGOTTEN_S: Final = 60.0
"""Nobody has dialed it for so long, so whether it can be reached now is not known."""


class ReconnectBackoff:
    """How long not to dial an incarnation: `min_s` after the first failure, doubling with each, at most `max_s`."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        # When it may be dialed again, the pause up to then, and when a dial failed first.
        self._failures: OrderedDict[Address, tuple[float, float, float]] = OrderedDict()

    def remaining_s(self, address: Address, now: float) -> float:
        until, _, _ = self._failures.get(address, (now, 0.0, now))
        return max(0.0, until - now)

    def failed(self, address: Address, now: float) -> None:
        """A dial got no welcome. When there are many failures, the oldest are forgotten."""
        # Popped and reinserted, so that the first key in the dictionary is the one that failed longest ago.
        _, pause_s, since = self._failures.pop(address, (0.0, 0.0, now))
        pause_s = min(pause_s * 2, self._max_s) if pause_s else self._min_s
        self._failures[address] = now + pause_s, pause_s, since
        if len(self._failures) > _MAX_REMEMBERED:
            self._failures.popitem(last=False)

    def failing(self, now: float) -> dict[Address, float]:
        """Who gave no welcome when it was dialed last, within the last minute, and for how many seconds that is so."""
        return {
            address: now - since for address, (until, _, since) in self._failures.items() if now - until < _FORGOTTEN_S
        }

    def succeeded(self, address: Address) -> None:
        self._failures.pop(address, None)
