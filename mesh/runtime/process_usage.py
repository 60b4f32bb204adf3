"""The resource usage of this process, as the system counts it."""

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

_STATM: Final = Path("/proc/self/statm")
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
