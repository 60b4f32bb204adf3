"""What this process uses of its host, as the system counts it."""

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage(NamedTuple):
    """`cpu_s`: seconds of a core that all threads have used; `memory_bytes`: resident, shared pages included.

    `memory_bytes` is None where it cannot be read, as by a process that has no descriptor left.
    """

    cpu_s: float
    memory_bytes: int | None


def process_usage() -> ProcessUsage:
    """Of this process, now."""
    cpu_s = time.process_time()
    try:
        # Not kept open: a fork would read its parent's.
        return ProcessUsage(cpu_s, int(_STATM.read_text().split()[1]) * _PAGE_BYTES)
    except OSError:
        return ProcessUsage(cpu_s, None)
