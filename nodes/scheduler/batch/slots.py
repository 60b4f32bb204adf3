"""Slots of the worker's table: each has one sequence from its first step until nothing of it is in flight. Pure."""


class Slots:
    """Hands out the number that came back last, or the next one: no more of them than were ever taken at once."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0

    @property
    def num_taken(self) -> int:
        """Slots that somebody has."""
        return self._num - len(self._free)

    def take(self) -> int:
        """A slot that nobody has."""
        # The last that came back first, so that numbers stay low: the worker refuses slots from `MAX_SLOTS` on.
        if self._free:
            return self._free.pop()
        self._num += 1
        return self._num - 1

    def give_back(self, slot: int) -> None:
        """Nothing of whoever had it is in flight; -1: who never had one."""
        if slot >= 0:
            self._free.append(slot)
