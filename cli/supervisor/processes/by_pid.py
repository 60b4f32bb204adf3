"""Processes by pid and start time: a pid alone may be a stranger's by now.

A pid is trusted only together with the process's start time, checked once a pidfd holds on to the process.
"""

import contextlib
import os
import re
import select
import signal
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Each asks a whole mesh to end, or its part on this host."""


class Process(NamedTuple):
    """One process, and no later one with its pid; `start_time` as of `start_time()`, 0 if it could not be read."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this pid now. Must be a child that is not reaped yet, or it may be any other process."""
        return cls(pid, start_time(pid) or 0)

    def is_same(self, other: "Process") -> bool:
        """Whether both are one process, as far as their start times are known."""
        return self.pid == other.pid and (
            self.start_time == other.start_time or 0 in (self.start_time, other.start_time)
        )


def start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may hold any character; the state, field 3, follows the last parenthesis.
    return int(stat.rpartition(")")[2].split()[19])


def open_process(pid: int, started: int) -> int | None:
    """A pidfd of the living process with this pid and start time; None if it is gone. The caller closes it.

    Also None if this user may not signal it: then it is no process of a mesh of theirs.
    """
    try:
        # First the pidfd, then the start time: in the other order another process could get the pid in between.
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    try:
        if start_time(pid) == started and not wait_dead(descriptor, 0.0):
            # Signal 0 only asks whether it may be signalled.
            signal.pidfd_send_signal(descriptor, 0)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def proportional_bytes(pid: int) -> int | None:
    """Memory of a process in which a page that n processes share counts as the n-th part of one; None if unreadable.

    Takes 2 to 20 ms for an actor, since the kernel goes through all its pages.
    """
    try:
        found = re.search(r"^Pss: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found is not None else None


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this pid and start time lives."""
    descriptor = open_process(pid, started)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def wait_dead(descriptor: int, timeout_s: float) -> bool:
    """Wait until the process of a pidfd has ended; False if it still lives."""
    readable, _, _ = select.select([descriptor], [], [], max(0.0, timeout_s))
    return bool(readable)


@contextlib.contextmanager
def on_signals(numbers: Iterable[signal.Signals], handle: Callable[[int, Any], None]) -> Generator[None]:
    """Have `handle` handle these signals, as long as the context lasts."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def leave_terminal(log: Path) -> None:
    """Give this process a session of its own, an empty stdin, and `log` as stdout and stderr."""
    # In the terminal's session, Ctrl-C and the terminal's end would reach a mesh in the background.
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(out)
