"""A busy process does not interrupt others: while it is, its threads run under the kernel's `SCHED_BATCH`.

A message wakes three threads: the sender's I/O thread, the receiver's, its loop. On a host with fewer free cores than
actors each of them would take a core from the one that runs, often from its own sender, between two messages of one
turn. A thread of `SCHED_BATCH` (sched(7)) waits for that one's end instead, by when there is more to do for one
wake-up; on a core that is free it runs as soon as any other. It gets as large a share, and is itself interrupted by all
that is not busy.
"""

import os
import time
from collections.abc import Callable
from typing import Final

from mesh.runtime.process_usage import ProcessUsage, process_usage

_BUSY_CORES: Final = 0.06
"""From here on others wait for it. At 0.25 the lighter roles went on interrupting gateway and schedulers: 16 and 64
clients of `echo` cost 0.90 and 0.96 of the CPU as before, at 0.06 they cost 0.78 and 0.88 (`benchmarks.trees`)."""
_IDLE_CORES: Final = 0.04
"""Well below, or the threads of a process that wavers would change their policy with every heartbeat."""
_LEAST_S: Final = 0.25
"""A share of a shorter time says little: the usage is asked for by `meshctl stats` at any moment, too."""


def set_policy_of_threads(policy: int) -> bool:
    """Give all threads of this process a policy without priorities; False if that is not allowed."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(thread), policy, os.sched_param(0))
        except ProcessLookupError:
            continue  # it has ended meanwhile
        except PermissionError:
            return False
    return True


class Interruption:
    """Owned by the process of one actor, whose heartbeats call `usage` each half second."""

    def __init__(
        self,
        read: Callable[[], ProcessUsage] = process_usage,
        set_policy: Callable[[int], bool] = set_policy_of_threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._set_policy = set_policy
        self._clock = clock
        # Whoever started this process under another policy has decided.
        self._may_change = os.sched_getscheduler(0) == os.SCHED_OTHER
        self._is_busy = False
        self._at_s = clock()
        self._cpu_s = read().cpu_s

    def usage(self) -> ProcessUsage:
        """The process's usage; on the way, its threads get the policy for what it has used since the last time."""
        usage, now = self._read(), self._clock()
        if (past_s := now - self._at_s) >= _LEAST_S and self._may_change:
            self._weigh((usage.cpu_s - self._cpu_s) / past_s)
            self._at_s, self._cpu_s = now, usage.cpu_s
        return usage

    def _weigh(self, cores: float) -> None:
        if self._is_busy == (is_busy := cores >= (_IDLE_CORES if self._is_busy else _BUSY_CORES)):
            return
        self._is_busy = is_busy
        # Refused (a container may forbid it): all stays as it is, and is not asked for again.
        self._may_change = self._set_policy(os.SCHED_BATCH if is_busy else os.SCHED_OTHER)
