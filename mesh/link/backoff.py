"""Pauses between dials of an incarnation that could not be reached. Pure; owned by `mesh/link/handshake.py`.

Whoever tells a member that is dead, and not yet known to be, would dial it again for every message.
"""

from collections import OrderedDict
from typing import Final

from mesh.address import Address

_MAX_REMEMBERED: Final = 1024


class ReconnectBackoff:
    """How long to leave an incarnation alone: `min_s` after the first failure, twice as long after each, to `max_s`."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._failures: OrderedDict[Address, tuple[float, float]] = OrderedDict()

    def remaining_s(self, address: Address, now: float) -> float:
        """Seconds until it may be dialed again; 0 if it may now."""
        until, _ = self._failures.get(address, (now, 0.0))
        return max(0.0, until - now)

    def failed(self, address: Address, now: float) -> None:
        """A dial did not lead to a welcome. The oldest failures are forgotten when there are many."""
        # Popped and put in again, so that the first in the dictionary is the one that failed longest ago.
        _, pause_s = self._failures.pop(address, (0.0, 0.0))
        pause_s = min(pause_s * 2, self._max_s) if pause_s else self._min_s
        self._failures[address] = now + pause_s, pause_s
        if len(self._failures) > _MAX_REMEMBERED:
            self._failures.popitem(last=False)

    def succeeded(self, address: Address) -> None:
        """It was reached."""
        self._failures.pop(address, None)
