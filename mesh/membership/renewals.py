"""The actors that leave their leases to this supervisor: whom it renews, and who has missed a change. Pure.

    an actor's heartbeat --heard--> renewed at the registry, from then on --no heartbeat for 3 intervals--> not renewed
                                                                          --its link is lost--------------> forgotten

A lease counts from the heartbeat, not from its renewal, so it ends as soon after an actor's last sign of life as if the
actor renewed it by itself. Invariants, whatever the order of events (`tests/mesh/membership/test_renewals.py`):
1. Nobody is renewed who was not heard of within `MISSED` intervals, and of an actor only its latest incarnation.
2. An actor that stays behind the supervisor's version is told so, at its second heartbeat at the latest.
"""

from typing import Final

from mesh.address import Address
from mesh.wire.frames import Renewed

Version = tuple[int, int]
"""Epoch and version of a registry: later ones are greater."""

EVERY: Final = 4
"""Heartbeats of a supervisor from one renewal to the next: 2 s, so that of a lease of 5 s one may be lost."""
_MISSED: Final = 3
"""Heartbeats after whose absence an actor is suspected; what it was last heard of is no sign of life any more."""
_NOT_JOINED: Final = 0


class _Heard:
    __slots__ = ("at", "epoch", "told")

    def __init__(self, epoch: int, at: float, told: Version) -> None:
        self.epoch = epoch
        self.at = at
        # What the registry's version was at this heartbeat: who does not know it by the next one has missed it.
        self.told = told


class Renewals:
    """The actors of one supervisor, in seconds of one clock; `heartbeat_s` is the interval of their heartbeats."""

    def __init__(self, heartbeat_s: float) -> None:
        self._silence_s = _MISSED * heartbeat_s
        self._heard: dict[str, _Heard] = {}

    def __contains__(self, address: Address) -> bool:
        heard = self._heard.get(address.actor_id)
        return heard is not None and heard.epoch == address.epoch

    def heard(self, address: Address, seen: Version, current: Version, now: float) -> bool:
        """A heartbeat of an actor that knows version `seen`, when this supervisor knows `current`.

        Returns whether to tell it that it is behind. Not at once: the registry's own word is on its way to it for up
        to 0.25 s (`_MAX_GATHER_S`), and an actor that has not joined yet is about to.
        """
        before = self._heard.get(address.actor_id)
        if before is not None and before.epoch > address.epoch:
            return False
        self._heard[address.actor_id] = _Heard(address.epoch, now, current)
        return before is not None and before.epoch == address.epoch and seen[0] != _NOT_JOINED and seen < before.told

    def lost(self, address: Address) -> None:
        if address in self:
            del self._heard[address.actor_id]

    def due(self, now: float) -> list[Renewed]:
        """Those whose leases are to be renewed now."""
        return [
            Renewed(actor_id, heard.epoch, max(0, int((now - heard.at) * 1000)))
            for actor_id, heard in self._heard.items()
            if now - heard.at <= self._silence_s
        ]

    def unknown(self, actor_ids: list[str]) -> list[Address]:
        """Those among them that the registry says hold no lease."""
        return [Address(actor_id, self._heard[actor_id].epoch) for actor_id in actor_ids if actor_id in self._heard]
