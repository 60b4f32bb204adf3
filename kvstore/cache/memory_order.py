"""In which order one process sees what another has stored to shared memory. Used by the page table."""

import platform
import threading
from typing import Final

STORES_ARE_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
"""What another process stores is seen in the order in which it stored it."""
_FENCE: Final = threading.Lock()


def fence() -> None:
    """Nothing that follows is read before what came before it was.

    A copy's reads must not be overtaken by those that say afterwards whose pages they were. A lock given back and taken
    again is the one full barrier that the language has. Not yet run on a machine that needs it.
    """
    for _ in range(2):
        with _FENCE:
            pass
