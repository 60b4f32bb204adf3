"""Slots of the worker's table: a sequence has one from its first step until nothing of it is in flight. Pure."""


class Slots:
    """Hands out the slot given back last, else a new one: there are never more slots than were in use at once."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0

    @property
    def num_taken(self) -> int:
        return self._num - len(self._free)

    def take(self) -> int:
        # The one given back last goes first, so that numbers stay low: the worker refuses slots from `MAX_SLOTS` on.
        if self._free:
            return self._free.pop()
        self._num += 1
        return self._num - 1

    def give_back(self, slot: int) -> None:
        """Free a slot whose sequence has nothing in flight; -1: that sequence never had one."""
        if slot >= 0:
            self._free.append(slot)
