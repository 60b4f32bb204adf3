"""How much of bodies may be held, by whom, and how fast each has to come. Pure.

A body counts from its first byte until it is decoded. The first 64 KiB of each draw on all there is, what goes beyond
that on three quarters, so that ordinary requests are taken while large bodies crowd. Of these three quarters one client
has at most as much as it leaves to everybody else: alone a half, one of two a third. Of the number of bodies it has at
most twice as many. A body that brings too little for a while is not waited for: who stops has to begin anew.
"""

from collections import Counter
from ipaddress import IPv6Address, ip_address, ip_network

from nodes.gateway.config import GatewayConfig

SMALL_BYTES = 64 << 10


def client_of(host: str) -> str:
    """Whose share a connection takes: an IPv4 address, or the /64 of an IPv6 address, which is one client's to fill."""
    if ":" not in host:
        return host
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # A provider gives each customer a /64 or more: counted by address, one client would be as many as it likes.
    return str(ip_network((int(address), 64), strict=False))


class BodyBudget:
    """What all bodies take together that are arriving, or have arrived and are not decoded."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.num_bytes = 0
        self.num_bodies = 0
        self._num_large_bytes = 0
        self._bodies_of: Counter[str] = Counter()
        self._large_bytes_of: Counter[str] = Counter()

    def open(self, client: str, now: float) -> "ArrivingBody | None":
        """A body of `client` begins; None if too many of its bodies are arriving."""
        # Twice what is left and not once: a proxy is one client, and fills no memory by this alone.
        if self._bodies_of[client] + 1 > 2 * (self.config.max_inflight - self.num_bodies):
            return None
        self.num_bodies += 1
        self._bodies_of[client] += 1
        return ArrivingBody(self, client, now)

    def take(self, client: str, num_bytes: int, num_large_bytes: int) -> bool:
        """Reserve bytes, of which some are beyond the first of their body; False if that is too much."""
        most = self.config.max_buffered_bytes
        if self.num_bytes + num_bytes > most:
            return False
        # Against what is free and not against a fixed share: a client alone may use memory that nobody else wants.
        free = most * 3 // 4 - self._num_large_bytes
        if num_large_bytes and self._large_bytes_of[client] + num_large_bytes > free:
            return False
        self.num_bytes += num_bytes
        self._num_large_bytes += num_large_bytes
        self._large_bytes_of[client] += num_large_bytes
        return True

    def close(self, client: str, num_bytes: int, num_large_bytes: int) -> None:
        """Release what `open` and `take` reserved for one body."""
        self.num_bodies -= 1
        self.num_bytes -= num_bytes
        self._num_large_bytes -= num_large_bytes
        for counts, number in ((self._bodies_of, 1), (self._large_bytes_of, num_large_bytes)):
            counts[client] -= number
            if not counts[client]:
                # Clients come and go.
                del counts[client]


class ArrivingBody:
    """One body. `deadline` is when it has to have brought more, or to be whole; by the clock of the given times."""

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
        # Computed anew from the sum, so that a piece that crosses the bound is split there.
        before = max(0, self._num_bytes - SMALL_BYTES)
        large = max(0, self._num_bytes + num_bytes - SMALL_BYTES) - before
        if not self._budget.take(self._client, num_bytes, large):
            return False
        self._num_bytes += num_bytes
        # Only a whole portion puts the deadline off: a byte now and then would hold a body's memory for the whole time.
        if self._num_bytes >= self._next:
            self._next = self._num_bytes + self._num_bytes_at_least
            self.deadline = min(self._end, now + self._pause_s)
        return True

    def close(self) -> None:
        """It is decoded, or will never be; again is harmless."""
        if self._is_open:
            self._is_open = False
            self._budget.close(self._client, self._num_bytes, max(0, self._num_bytes - SMALL_BYTES))
