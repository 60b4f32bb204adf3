"""How many bodies and how much of them may be held, for which client, and how fast each has to arrive. Pure.

A body counts from its first byte until it is decoded. The first 64 KiB of each body may use all of the memory, the rest
of it only three quarters, so that ordinary requests are taken while large bodies crowd. Of these three quarters, one
client may hold at most as much as is left free: a half if it is alone, a third if it is one of two. It may have at most
twice as many bodies as could still be opened. A body that brings too little for a while is given up: a client that
stalls has to start again.
"""

from collections import Counter

from nodes.gateway.config import GatewayConfig

SMALL_BYTES = 64 << 10
"""An ordinary chat. 256 MiB, a quarter of which are kept for these parts, hold them of 1,024 bodies and more."""


class BodyBudget:
    """All bodies that are arriving or not decoded yet, and what they take together."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.num_bytes = 0
        self.num_bodies = 0
        self._num_large_bytes = 0
        self._bodies_of: Counter[str] = Counter()
        self._large_bytes_of: Counter[str] = Counter()

    def open(self, client: str, now: float) -> "ArrivingBody | None":
        """A body of `client` begins; None if too many of its bodies are arriving."""
        # Twice what is left and not once: a proxy counts as one client, and the number of bodies alone fills no memory.
        if self._bodies_of[client] + 1 > 2 * (self.config.max_inflight - self.num_bodies):
            return None
        self.num_bodies += 1
        self._bodies_of[client] += 1
        return ArrivingBody(self, client, now)

    def take(self, client: str, num_bytes: int, num_large_bytes: int) -> bool:
        """Reserve bytes, `num_large_bytes` of them beyond the first 64 KiB of their body; False if that is too much."""
        most = self.config.max_buffered_bytes
        if self.num_bytes + num_bytes > most:
            return False
        # Compared with what is free, not with a fixed share: a lone client may use memory that nobody else wants.
        free = most * 3 // 4 - self._num_large_bytes
        if num_large_bytes and self._large_bytes_of[client] + num_large_bytes > free:
            return False
        self.num_bytes += num_bytes
        self._num_large_bytes += num_large_bytes
        self._large_bytes_of[client] += num_large_bytes
        return True

    def close(self, client: str, num_bytes: int, num_large_bytes: int) -> None:
        self.num_bodies -= 1
        self.num_bytes -= num_bytes
        self._num_large_bytes -= num_large_bytes
        for counts, number in ((self._bodies_of, 1), (self._large_bytes_of, num_large_bytes)):
            counts[client] -= number
            if not counts[client]:
                # Clients come and go: forget those without bodies.
                del counts[client]


class ArrivingBody:
    """One body. By `deadline` more of it, or all of it, has to be here, on the clock of the `now` arguments."""

    def __init__(self, budget: BodyBudget, client: str, now: float) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0
        self._is_open = True
        config = budget.config
        self._end = now + config.body_timeout_s
        self._pause_s = config.body_pause_s
        self._num_bytes_at_least = config.min_body_bytes_per_s * config.body_pause_s
        self._next = self._num_bytes_at_least
        self.deadline = min(self._end, now + self._pause_s)

    def take(self, num_bytes: int, now: float) -> bool:
        """More of it has come; False if it cannot be held."""
        # Computed from the sum, so that a piece that crosses the bound is split there.
        before = max(0, self._num_bytes - SMALL_BYTES)
        large = max(0, self._num_bytes + num_bytes - SMALL_BYTES) - before
        if not self._budget.take(self._client, num_bytes, large):
            return False
        self._num_bytes += num_bytes
        # Only a whole portion postpones the deadline: else a byte now and then would hold its memory until the end.
        if self._num_bytes >= self._next:
            self._next = self._num_bytes + self._num_bytes_at_least
            self.deadline = min(self._end, now + self._pause_s)
        return True

    def close(self) -> None:
        """The body is decoded, or will never be; calling this again is harmless."""
        if self._is_open:
            self._is_open = False
            self._budget.close(self._client, self._num_bytes, max(0, self._num_bytes - SMALL_BYTES))
