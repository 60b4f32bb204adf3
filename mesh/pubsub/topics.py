"""Topics: numbered publications with a bounded replay ring, and the subscriber's side of the numbering. Pure.

    publisher:   append -> 1, 2, 3, …; keeps the last ones, bounded in number and bytes, for subscribers with a gap
    subscriber:  expects the next number; drops a repeat; on a gap it subscribes again from its current position;
                 a gap beyond what the ring holds, or a new publisher epoch, is a reset: it starts from nothing

Owned by `mesh/pubsub/publishing.py`.
"""

import enum
from collections import deque
from collections.abc import Sized
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

Payload = TypeVar("Payload", bound=Sized)

NEVER: Final = float("-inf")
"""Value of `last_heard`: since the publisher was lost, nothing was received from it or requested."""


class Replay(NamedTuple, Generic[Payload]):
    """What a subscriber is sent: publications `first`, `first + 1`, …; `reset` if that is not what it asked for."""

    first: int
    reset: bool
    payloads: list[Payload]


class TopicLog(Generic[Payload]):
    """The publisher's side of one topic: keeps at most `capacity` publications of at most `max_bytes` together."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._ring: deque[Payload] = deque()
        self._capacity = capacity
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.last = 0

    def append(self, payload: Payload) -> int:
        """Keep a publication and number it. One larger than `max_bytes` leaves the ring empty."""
        self._ring.append(payload)
        self.num_bytes += len(payload)
        while len(self._ring) > self._capacity or self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._ring.popleft())
        self.last += 1
        return self.last

    def replay(self, next_sequence: int) -> Replay[Payload]:
        """Everything from `next_sequence` on; if that has left the ring or lies ahead: a reset, starting from now."""
        missing = self.last + 1 - next_sequence
        if next_sequence < 1 or missing < 0 or missing > len(self._ring):
            return Replay(self.last + 1, True, [])
        return Replay(next_sequence, False, list(islice(self._ring, len(self._ring) - missing, None)))


class Arrival(enum.Enum):
    """What a publication's number says about it: only `NEXT` is delivered; on `GAP` the subscriber subscribes again."""

    NEXT = enum.auto()
    REPEAT = enum.auto()
    GAP = enum.auto()


class Subscription:
    """The subscriber's side of one topic of one actor, across all its incarnations.

    `next_sequence` is 0 until the publisher has said where the subscription starts. `last_heard` is when the publisher
    last sent something or was last sent a request, in seconds.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.next_sequence = 0
        self.waiting = True
        self.last_heard = NEVER

    def request(self, epoch: int) -> tuple[int, int]:
        """What to request of an incarnation of the publisher: (publisher epoch, next sequence); waits from now on.

        From a new incarnation this is everything since its first publication, if its ring still holds that.
        """
        self.waiting = True
        return (epoch, self.next_sequence if epoch == self.epoch and self.next_sequence else 1)

    def confirmed(self, epoch: int, next_sequence: int, reset: bool) -> bool:
        """The publisher has said what it sends next. Returns whether the subscriber has to start from nothing."""
        starts_anew = reset or epoch != self.epoch or self.next_sequence == 0
        if starts_anew:
            self.epoch, self.next_sequence = epoch, next_sequence
        self.waiting = False
        return starts_anew

    def arrived(self, epoch: int, sequence: int) -> Arrival:
        if self.waiting or epoch != self.epoch or sequence < self.next_sequence:
            return Arrival.REPEAT
        if sequence > self.next_sequence:
            return Arrival.GAP
        self.next_sequence += 1
        return Arrival.NEXT
