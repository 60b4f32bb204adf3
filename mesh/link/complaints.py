"""Which refused messages are worth a warning: each kind from each actor once, and none that only came late.

Owned by `mesh/link/refusals.py`; counters count them all.
"""

from typing import Final

from mesh.address import Address

_MAX_REMEMBERED: Final = 1024


class Complaints:
    """What has been complained of, and whose links have ended; both bounded."""

    def __init__(self) -> None:
        self._made: set[tuple[str, str]] = set()
        self._ended: dict[Address, None] = {}

    def link_ended(self, peer: Address) -> None:
        """What this incarnation sent before it knew, or before it died, may still come and has no hello before it."""
        self._ended[peer] = None
        if len(self._ended) > _MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def is_new(self, peer: Address, code: str) -> bool:
        """Whether to complain of a refusal; it is not new a second time."""
        complaint = (peer.actor_id, code)
        if complaint in self._made or len(self._made) >= _MAX_REMEMBERED:
            return False
        if code == "no_hello" and peer in self._ended:
            return False
        self._made.add(complaint)
        return True
