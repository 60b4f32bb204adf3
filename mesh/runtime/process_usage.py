"""What this process uses of its host, as the system counts it."""

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage(NamedTuple):
    """`cpu_s`: seconds of a core that all threads have used; `memory_bytes`: resident, shared pages included."""

    cpu_s: float
    memory_bytes: int


def process_usage() -> ProcessUsage:
    """Of this process, now."""
    return ProcessUsage(time.process_time(), int(_STATM.read_text().split()[1]) * _PAGE_BYTES)
