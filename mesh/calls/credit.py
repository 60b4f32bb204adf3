"""Credit of one stream: the receiver says how many items it accepts in total, and the sender never sends more.

    receiver  --credit(limit)-->  sender        limits are absolute and only grow, so repeats and losses are harmless
    receiver  <--item(position)-- sender        positions count from 0; one below the next is a repeat, above it a gap

Pure; owned by `mesh/calls/streaming.py` (receiver) and `mesh/calls/serving.py` (sender).
"""

import enum


class CreditGate:
    """The sender's side. Invariant: `sent <= limit`."""

    __slots__ = ("limit", "sent")

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, 0)
        self.sent = 0

    @property
    def is_open(self) -> bool:
        """Whether one more item may be sent."""
        return self.sent < self.limit

    def take(self) -> int:
        """The position of the item about to be sent. Only while the gate is open."""
        assert self.sent < self.limit, "an item was sent without credit"
        position = self.sent
        self.sent += 1
        return position

    def grant(self, limit: int) -> bool:
        """A limit arrived. Returns whether it opened the gate; an older limit changes nothing."""
        was_open = self.is_open
        self.limit = max(self.limit, limit)
        return not was_open and self.is_open


class Arrival(enum.Enum):
    """What an item's position says about it."""

    NEXT = enum.auto()
    REPEAT = enum.auto()
    GAP = enum.auto()
    WITHOUT_CREDIT = enum.auto()


class CreditWindow:
    """The receiver's side: at most `window` items are in flight or unread.

    A new limit is sent when half the window has been read, so credit costs two messages per window.
    Invariant: `consumed <= received <= limit == announced limit <= consumed + window`.
    """

    __slots__ = ("consumed", "limit", "received", "window")

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a stream's window must be at least 1 item, not {window}")
        self.window = window
        self.limit = window
        self.received = 0
        self.consumed = 0

    def receive(self, position: int) -> Arrival:
        """An item arrived; only `NEXT` is to be kept."""
        if position < self.received:
            return Arrival.REPEAT
        if position >= self.limit:
            return Arrival.WITHOUT_CREDIT
        if position > self.received:
            return Arrival.GAP
        self.received += 1
        return Arrival.NEXT

    def consume(self) -> int | None:
        """An item was read. Returns the new limit to send, or None while that can wait."""
        assert self.consumed < self.received, "an item was read before it arrived"
        self.consumed += 1
        if self.limit - self.consumed > self.window // 2:
            return None
        self.limit = self.consumed + self.window
        return self.limit
