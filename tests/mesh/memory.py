"""What this process takes of the machine's memory."""

import os
from pathlib import Path


def resident_mib():
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
