"""What workers have read of one prompt, by position. Pure; scheduler and gateway each keep one for a request."""


class PromptPayloads:
    """Payloads of the prompt's positions `begin .. end - 1`, which come in order; all have the same size.

    `end` is the length of the prompt. Nothing comes before its first token, so nothing is read of position 0.
    """

    __slots__ = ("_data", "_end", "begin", "size")

    def __init__(self, begin: int, end: int) -> None:
        self.begin = max(1, begin)
        self._end = end
        self._data = bytearray()
        self.size = 0

    @property
    def next(self) -> int:
        """The first position that is missing."""
        return self.begin + (len(self._data) // self.size if self.size else 0)

    @property
    def is_whole(self) -> bool:
        return self.next >= self._end

    def add(self, position: int, count: int, data: bytes) -> bool:
        """Take what is new of `count` payloads from `position` on. False if some before them are missing, or they
        cannot be payloads of this prompt.
        """
        size = len(data) // count if count > 0 else 0
        num_known = self.next - position
        is_fitting = size > 0 and size * count == len(data) and position > 0 and position + count <= self._end
        if not is_fitting or num_known < 0 or (self.size and size != self.size):
            return False
        self.size = size
        # By position: a chunk that was computed again, or told again, has what is known already.
        self._data += data[num_known * size :]
        return True

    def since(self, position: int) -> bytes:
        """The payloads from `position` on, `begin` or a later one, as far as they have come."""
        return bytes(self._data[(position - self.begin) * self.size :])
