"""The order in which one process sees another's stores to shared memory. Used by the page table."""

import platform
import threading
from typing import Final

STORES_ARE_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
"""Whether another process's stores become visible in the order in which it made them."""
# Never contended: taken only for the barrier that taking it is, see `fence`.
_FENCE: Final = threading.Lock()


def fence() -> None:
    """A full barrier: no read after it is made before a read that precedes it.

    The reads that check afterwards whose pages were copied must not overtake the copy's own. Releasing a lock and
    taking it again is the one full barrier that the language has. Not yet run on a machine that needs it.
    """
    for _ in range(2):
        with _FENCE:
            pass
