"""How processes ended: in words, in one word for counters, and whether somebody else ended them.

A SIGKILL that the supervisor did not send is somebody else's doing, unless the kernel has killed for lack of memory
since the last one; every other end is the process's own.
"""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

OUT_OF_MEMORY: Final = "out_of_memory"
_KEY: Final = "oom_kill"
_SAME_KILL_S: Final = 1.0
"""One shortage may end several processes, reaped one after the other; deaths by hand follow later."""


class Exit(NamedTuple):
    """The end of a process. `cause` is one of a few values: `exit_3`, `SIGSEGV`, `out_of_memory`."""

    text: str
    cause: str
    foreign: bool


class Exits:
    """Reads exit statuses. `counts` are the files where the kernel counts its kills for lack of memory."""

    def __init__(self, counts: Sequence[Path] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = kernel_counts() if counts is None else counts
        self._clock = clock
        self._num_kills = self._count()
        self._grew_at: float | None = None

    def read(self, status: int) -> Exit:
        """What a status, as of `waitstatus_to_exitcode`, means. Called once for each death, soon after it."""
        text, cause = describe_exit(status)
        if status != -signal.SIGKILL:
            return Exit(text, cause, foreign=False)
        if self._was_short_of_memory():
            return Exit(f"{text}, out of memory", OUT_OF_MEMORY, foreign=False)
        return Exit(text, cause, foreign=True)

    def _was_short_of_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the last look; it does not say which."""
        now, num_kills = self._clock(), self._count()
        if num_kills > self._num_kills:
            self._num_kills, self._grew_at = num_kills, now
        return self._grew_at is not None and now - self._grew_at < _SAME_KILL_S

    def _count(self) -> int:
        total = 0
        for path in self._counts:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            total += sum(int(value) for key, _, value in (line.partition(" ") for line in lines) if key == _KEY)
        return total


def kernel_counts() -> list[Path]:
    """The system's count, and that of this process's own control group: a container may have only the latter."""
    counts = [Path("/proc/vmstat")]
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return counts
    for group in groups:
        hierarchy, _, path = group.partition("::")
        if hierarchy == "0":
            counts.append(Path(f"/sys/fs/cgroup{path}") / "memory.events")
    return counts


def describe_exit(status: int) -> tuple[str, str]:
    """An exit status in words and in one word: `exit 3` and `exit_3`, or `signal 9 (SIGKILL)` and `SIGKILL`."""
    if status >= 0:
        return f"exit {status}", f"exit_{status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}", f"signal_{-status}"
    return f"signal {-status} ({name})", name
