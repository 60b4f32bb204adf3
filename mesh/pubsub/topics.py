"""Topics: numbered publications with a bounded replay ring, and the subscriber's side of the numbering. Pure.

    publisher:   append -> 1, 2, 3, …; keeps the last ones, bounded in number and bytes, for who comes back with a gap
    subscriber:  next is expected; a repeat is dropped; a gap makes it subscribe again from where it was;
                 what the ring no longer holds, and a new publisher epoch, is a reset: it starts from nothing

Owned by `mesh/pubsub/publishing.py`.
"""

import enum
from collections import deque
from collections.abc import Sized
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

Payload = TypeVar("Payload", bound=Sized)

NEVER: Final = float("-inf")
"""Last heard: not since the publisher was lost, nor has it been asked since."""


class Replay(NamedTuple, Generic[Payload]):
    """What a subscriber is given: publications `first`, `first + 1`, …; `reset` if it asked for an earlier one."""

    first: int
    reset: bool
    payloads: list[Payload]


class TopicLog(Generic[Payload]):
    """The publisher's side of one topic: keeps `capacity` publications at most, and `max_bytes` of them."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._ring: deque[Payload] = deque()
        self._capacity = capacity
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.last = 0

    def append(self, payload: Payload) -> int:
        """Keep a publication and number it. One larger than all that may be kept leaves nothing in the ring."""
        self._ring.append(payload)
        self.num_bytes += len(payload)
        while len(self._ring) > self._capacity or self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._ring.popleft())
        self.last += 1
        return self.last

    def replay(self, next_sequence: int) -> Replay[Payload]:
        """Everything from `next_sequence` on; if it is gone from the ring or not there yet: from now on, as a reset."""
        missing = self.last + 1 - next_sequence
        if next_sequence < 1 or missing < 0 or missing > len(self._ring):
            return Replay(self.last + 1, True, [])
        return Replay(next_sequence, False, list(islice(self._ring, len(self._ring) - missing, None)))


class Arrival(enum.Enum):
    """What the number of a publication says about it: only the next is handed on, a gap is subscribed over again."""

    NEXT = enum.auto()
    REPEAT = enum.auto()
    GAP = enum.auto()


class Subscription:
    """The subscriber's side of one topic of one actor, over all incarnations of it.

    `next_sequence` is 0 until the publisher has said where the subscription starts. `last_heard` is when the publisher
    said something, or was asked, seconds.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.next_sequence = 0
        self.waiting = True
        self.last_heard = NEVER

    def request(self, epoch: int) -> tuple[int, int]:
        """What to ask an incarnation of the publisher for: (publisher epoch, next sequence); waits from now on.

        Of a new incarnation it is everything from the first publication on, as far as its ring still holds that.
        """
        self.waiting = True
        return (epoch, self.next_sequence if epoch == self.epoch and self.next_sequence else 1)

    def confirmed(self, epoch: int, next_sequence: int, reset: bool) -> bool:
        """The publisher says what it sends next; whether the subscriber has to start from nothing."""
        starts_anew = reset or epoch != self.epoch or self.next_sequence == 0
        if starts_anew:
            self.epoch, self.next_sequence = epoch, next_sequence
        self.waiting = False
        return starts_anew

    def arrived(self, epoch: int, sequence: int) -> Arrival:
        """A publication came; only `NEXT` is to be handed on."""
        if self.waiting or epoch != self.epoch or sequence < self.next_sequence:
            return Arrival.REPEAT
        if sequence > self.next_sequence:
            return Arrival.GAP
        self.next_sequence += 1
        return Arrival.NEXT
