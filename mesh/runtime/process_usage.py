"""The resource usage and the age of this process, as the system counts them."""

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

_STATM: Final = Path("/proc/self/statm")
_STAT: Final = Path("/proc/self/stat")
_START_FIELD: Final = 19
"""`starttime` is field 22 of proc(5); what is behind the name, which may hold anything, begins with field 3."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage(NamedTuple):
    """CPU seconds of all threads; resident bytes, shared pages included, None if unreadable (no descriptor left)."""

    cpu_s: float
    memory_bytes: int | None


def process_usage() -> ProcessUsage:
    """The usage of this process, now."""
    cpu_s = time.process_time()
    try:
        # Not kept open: a forked child would read its parent's file.
        return ProcessUsage(cpu_s, int(_STATM.read_text().split()[1]) * _PAGE_BYTES)
    except OSError:
        return ProcessUsage(cpu_s, None)


def process_age_s() -> float:
    """Seconds since this process was forked, to a hundredth; 0.0 if that is unreadable (no descriptor left)."""
    try:
        fields = _STAT.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    began_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
