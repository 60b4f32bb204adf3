"""Checks that a test leaves nothing behind: tasks, file descriptors, /dev/shm segments, child processes.

Takes a snapshot before and compares after; what existed before is not reported. Linux only (reads /proc).
"""

import asyncio
import gc
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SHM = Path("/dev/shm")
_POLL_S = 0.02
"""In real time: 50 looks at /proc a second cost little, and what ends by itself holds a test up no longer than this."""


class LeakError(AssertionError):
    """Something outlived the code that owned it; the message names each thing."""


@dataclass(frozen=True)
class Snapshot:
    """What this process holds now. `shm_prefix` selects the segments to check."""

    shm_prefix: str
    tasks: frozenset[asyncio.Task[object]] = frozenset()
    fds: dict[int, str] = field(default_factory=dict[int, str])
    segments: frozenset[str] = frozenset()
    children: dict[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def take(cls, shm_prefix: str = "kvmesh") -> "Snapshot":
        """Take a snapshot now; its tasks are those of the running loop except the current one."""
        return cls(shm_prefix, _tasks(), _fds(), _segments(shm_prefix), _children())

    def leaks(self) -> list[str]:
        gc.collect()
        now = Snapshot.take(self.shm_prefix)
        tasks = [f"task {task.get_name()}: {task.get_coro()}" for task in now.tasks - self.tasks]
        fds = [f"fd {fd}: {target}" for fd, target in now.fds.items() if self.fds.get(fd) != target]
        segments = [f"segment {SHM / name}" for name in now.segments - self.segments]
        children = [f"child process {pid}: {name}" for pid, name in now.children.items() if pid not in self.children]
        return sorted(tasks) + fds + sorted(segments) + children


@contextmanager
def assert_no_leaks(*, shm_prefix: str = "kvmesh", within_s: float = 0.0) -> Generator[Snapshot]:
    """Raise `LeakError` if the body left something that still exists `within_s` seconds of real time after it."""
    before = Snapshot.take(shm_prefix)
    yield before
    deadline = time.monotonic() + within_s
    leaks = before.leaks()
    while leaks and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        leaks = before.leaks()
    if leaks:
        raise LeakError("left behind: " + "; ".join(leaks))


def _tasks() -> frozenset[asyncio.Task[object]]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return frozenset()
    return frozenset(task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop))


def _fds() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this very listing
            continue
    return found


def _segments(prefix: str) -> frozenset[str]:
    return frozenset(name for name in os.listdir(SHM) if name.startswith(prefix)) if SHM.is_dir() else frozenset()


def _children() -> dict[int, str]:
    own = str(os.getpid())
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        # The name is in parentheses and may contain any character; state and parent follow the last parenthesis.
        name, _, rest = stat.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if parent == own:
            found[int(entry)] = f"{name} ({state})"
    return found
