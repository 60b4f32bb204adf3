"""The bounded mailbox of an actor: the calls it has taken and not answered yet. Pure.

A call beyond the limits is answered `overloaded` at once, so a slow actor slows its askers instead of growing. One
sender gets at most half the room, so none shuts the others out. Owned by `mesh/calls/serving.py`.
"""

import enum
from collections import OrderedDict
from typing import Final, TypeVar

from mesh.address import Address
from mesh.calls.table import CallTable

Value = TypeVar("Value")
_REMEMBERED: Final = 256

MailKey = tuple[Address, int]
"""Who asks, and the message id of the ask."""


class Admission(enum.Enum):
    """What becomes of a call that came."""

    TAKEN = enum.auto()
    REPEATED = enum.auto()
    CANCELLED = enum.auto()
    OVERLOADED = enum.auto()


class Mailbox(CallTable[MailKey, Value]):
    """Calls by (sender, message id)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.per_sender = max(1, capacity - capacity // 2)
        self._counts: dict[Address, int] = {}
        self._cancelled: OrderedDict[MailKey, None] = OrderedDict()

    def admit(self, sender: Address, message_id: int, deadline: float, value: Value) -> Admission:
        """Take a call in if there is room and it is new."""
        key = (sender, message_id)
        if key in self._entries:
            return Admission.REPEATED
        if self._cancelled and self._cancelled.pop(key, self) is None:
            return Admission.CANCELLED
        count = self._counts.get(sender, 0)
        if self.is_full or count >= self.per_sender:
            return Admission.OVERLOADED
        self.add(key, sender, deadline, value)
        self._counts[sender] = count + 1
        return Admission.TAKEN

    def cancel(self, key: MailKey) -> Value | None:
        """Take out a call that is no longer wanted. One that is not there is remembered for a while.

        `cancel` travels on the control lane and may come before a call that travels with bulk.
        """
        value = self.settle(key)
        if value is None:
            self._cancelled[key] = None
            if len(self._cancelled) > _REMEMBERED:
                self._cancelled.popitem(last=False)
        return value

    def settle(self, key: MailKey) -> Value | None:
        """Take a call out; None if that has happened already."""
        value = super().settle(key)
        if value is not None:
            self._release(key[0])
        return value

    def lose(self, peer: Address) -> list[Value]:
        """Take out all calls of a sender that is gone."""
        self._counts.pop(peer, None)
        return super().lose(peer)

    def expire(self, now: float) -> list[tuple[MailKey, Address, Value]]:
        """Take out all calls whose asker no longer waits."""
        expired = super().expire(now)
        for _, sender, _ in expired:
            self._release(sender)
        return expired

    def close(self) -> list[Value]:
        """Take everything out."""
        self._counts.clear()
        return super().close()

    def _release(self, sender: Address) -> None:
        left = self._counts[sender] - 1
        if left:
            self._counts[sender] = left
        else:
            del self._counts[sender]
