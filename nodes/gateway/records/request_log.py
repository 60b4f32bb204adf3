"""Which calls get a line in a gateway's request log: there may be more of them than anybody wants to keep. Pure."""

import zlib
from typing import Final

from nodes.gateway.config import RequestLog
from nodes.protocol.records import CallRecord

MAX_LINES_PER_S: Final = 50
"""20 KB a second, 16 MiB in a quarter of an hour."""
MAX_FORCED_PER_S: Final = 500
"""Errors and slow calls get a line whatever the sampling; a client that is refused in a loop brings thousands."""


class Chooser:
    """`which` get lines; `slow_s` and `slow_first_token_s` (0: never) say what is slow."""

    def __init__(self, which: RequestLog, *, slow_s: float, slow_first_token_s: float) -> None:
        self._which = which
        self._slow_s = slow_s
        self._slow_first_token_s = slow_first_token_s
        self._sampling = _Sampling()

    def share(self, call: CallRecord, now: float) -> int:
        """How many calls the line of this one stands for; 0: it gets none."""
        is_error = call.status >= 400 or bool(call.code)
        is_slow = 0 < self._slow_s <= call.total_s or 0 < self._slow_first_token_s <= call.first_token_s
        match self._which:
            case "none":
                return 0
            case "errors" if not is_error:
                return 0
            case "slow" if not (is_slow or is_error):
                return 0
            case _:
                return self._sampling.share(call.request_id, now, forced=is_error or is_slow)


class _Sampling:
    """One call of every `share`, a power of two, by the hash of its id: whoever has the id can tell whether it has a
    line, and all gateways would choose the same.
    """

    def __init__(self) -> None:
        self._share = 1
        self._second = 0
        self._num = self._num_chosen = self._num_forced = 0

    def share(self, request_id: str, now: float, *, forced: bool) -> int:
        if int(now) != self._second:
            self._begin(int(now))
        if forced:
            self._num_forced += 1
            return int(self._num_forced <= MAX_FORCED_PER_S)
        self._num += 1
        number = zlib.crc32(request_id.encode())
        if number % self._share == 0 and self._num_chosen == MAX_LINES_PER_S:
            # A burst: from here on half as many, without waiting for the second to end.
            self._share *= 2
            self._num_chosen = 0
        if number % self._share:
            return 0
        self._num_chosen += 1
        return self._share

    def _begin(self, second: int) -> None:
        share = 1
        # What the last second brought is what the next one is expected to bring, unless there was a pause.
        while second == self._second + 1 and self._num > share * MAX_LINES_PER_S:
            share *= 2
        self._share, self._second = share, second
        self._num = self._num_chosen = self._num_forced = 0
