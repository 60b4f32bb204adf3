"""Heartbeat loss: a peer that has not been heard of for some beats is suspected dead. Pure.

A process that was stopped or starved itself sees everybody as silent when it wakes, so a monitor whose own tick came
late forgives: all deadlines start again. Owned by `mesh/membership/heartbeats.py`.
"""

from mesh.address import Address


class LivenessMonitor:
    """Watches peers by the time they were last heard of. All times in seconds on one clock."""

    def __init__(self, interval_s: float, allowed_misses: int) -> None:
        self._interval_s = interval_s
        self._silence_s = interval_s * allowed_misses
        self._last_heard: dict[Address, float] = {}
        self._last_tick: float | None = None
        self.num_overslept = 0

    def watch(self, peer: Address, now: float) -> None:
        """Expect life signs of a peer from now on; nothing changes if they are expected already."""
        self._last_heard.setdefault(peer, now)

    def forget(self, peer: Address) -> None:
        """Expect none any more."""
        self._last_heard.pop(peer, None)

    def heard(self, peer: Address, now: float) -> None:
        """Any message came from a peer."""
        if peer in self._last_heard:
            self._last_heard[peer] = now

    def tick(self, now: float) -> list[Address]:
        """Called every interval; the peers that are suspected from now on, which are no longer watched."""
        late = self._last_tick is not None and now - self._last_tick > 2 * self._interval_s
        self._last_tick = now
        if late:
            self.num_overslept += 1
            for peer in self._last_heard:
                self._last_heard[peer] = now
            return []
        silent = sorted(peer for peer, heard in self._last_heard.items() if now - heard > self._silence_s)
        for peer in silent:
            del self._last_heard[peer]
        return silent
