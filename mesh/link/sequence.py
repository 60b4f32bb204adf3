"""Link sequence numbers: what makes repeats and gaps visible on a path that promises neither.

The upper half of a number counts the sender's connections, the lower half the messages on one lane of one of them:
numbers of one sender only grow, so a late message of an older connection is a repeat, and a connection that begins
again shows. 0 is for errors about a connection that the sender of the error has no record of.
"""

from typing import Final

UNNUMBERED: Final = 0
DUPLICATE: Final = -1
OTHER_CONNECTION: Final = -2
_SHIFT: Final = 32


class OutgoingSequence:
    """The sender's side of one lane of its connection number `connection` (from 1)."""

    __slots__ = ("last",)

    def __init__(self, connection: int) -> None:
        self.last = connection << _SHIFT

    def take(self) -> int:
        """The next number."""
        self.last += 1
        return self.last

    def give_back(self) -> None:
        """The message with the last number could not be queued."""
        self.last -= 1


def connection_of(sequence: int) -> int:
    """The number of the connection that a message was sent on, as its sender counts."""
    return sequence >> _SHIFT


class IncomingSequence:
    """The receiver's side of one lane of the sender's connection number `connection`, or of the first one seen.

    Order within a lane is the transport's promise: a number not above the last is a repeat.
    """

    __slots__ = ("last",)

    def __init__(self, connection: int = 0) -> None:
        self.last = connection << _SHIFT

    def accept(self, sequence: int) -> int:
        """`DUPLICATE`, `OTHER_CONNECTION` (a later one), or how many messages are missing before this one."""
        last = self.last
        if sequence == last + 1:
            self.last = sequence
            return 0
        if sequence <= last:
            return DUPLICATE
        if last and sequence >> _SHIFT != last >> _SHIFT:
            return OTHER_CONNECTION
        self.last = sequence
        return sequence - last - 1 if last else 0
