"""Processes of the supervisor: started, signalled, reaped.

The supervisor is a subreaper, so a process whose parent is gone becomes its child: an actor when the zygote's
short-lived helper exits, a renderer when its tokenizer dies. Deaths come by SIGCHLD and are reported to the watcher of
that process; a child that died before it was watched is remembered for a while. Once a child is reaped its pid may be
reused, so processes are told apart by pid and start time. Until then it cannot be reused, so signals go by pid.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from site import getsitepackages, getusersitepackages
from typing import Final, NamedTuple

import cli
from cli.supervisor.processes.by_pid import Process
from nodes.worker.environment import TORCH_ENVIRONMENT

# linux/prctl.h, both.
_PR_SET_NAME: Final = 15
# The same.
_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_UNCLAIMED: Final = 256
"""A fork is claimed milliseconds after its death. The rest are orphans that nobody asks about."""

OnExit = Callable[[int], None]


class _Watched(NamedTuple):
    start_time: int
    on_exit: OnExit


class Children:
    """All children of this process. Belongs to one event loop, in the main thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[int, _Watched] = {}
        self._unclaimed: deque[tuple[Process, int]] = deque(maxlen=_MAX_UNCLAIMED)
        self._died = asyncio.Event()
        become_subreaper()
        # Not by the loop's own handlers, which uvloop refuses for this signal.
        signal.signal(signal.SIGCHLD, self._on_signal)

    def watch(self, process: Process, on_exit: OnExit) -> None:
        """Call `on_exit(status)` once, later, when the child has been reaped; `status` as of `waitstatus_to_exitcode`.

        `process` is a child, or one that becomes a child because its parent is dead.
        """
        # Its end may be known already: a fork that dies at once is reaped before the zygote's message about it is read.
        for dead, status in self._unclaimed:
            if process.is_same(dead):
                self._unclaimed.remove((dead, status))
                self._loop.call_soon(on_exit, status)
                return
        self._watched[process.pid] = _Watched(process.start_time, on_exit)
        # It may have died before this call, with the signal already handled.
        self._loop.call_soon(self._reap)

    def unwatch(self, pid: int) -> None:
        self._watched.pop(pid, None)

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a watched child; nothing if it is gone already."""
        # Only to watched ones: a pid that is not watched may have been reaped, and be a stranger's.
        if pid in self._watched:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

    def unwatched(self) -> list[int]:
        found: list[int] = []
        # Each thread has its own list of children in /proc.
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return sorted(pid for pid in found if pid not in self._watched)

    async def end_unwatched(self, grace_s: float) -> None:
        """Wait until no unwatched child is left. After `grace_s` those alive are killed, and the orphans they leave."""
        deadline = self._loop.time() + grace_s
        while orphans := self.unwatched():
            if self._loop.time() >= deadline:
                # At every turn, not once: killing a parent brings its children to us.
                for pid in orphans:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            # Bounded, since a signal may come between the check and the wait.
            await self.next_death(0.1)

    async def next_death(self, timeout_s: float) -> None:
        self._died.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._died.wait()
        except TimeoutError:
            self._reap()

    def close(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        while True:
            try:
                # Left unreaped until its start time is read, which is gone afterwards.
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            process = Process.of(dead.si_pid)
            _, status = os.waitpid(process.pid, 0)
            self._ended(process, os.waitstatus_to_exitcode(status))

    def _ended(self, process: Process, status: int) -> None:
        self._died.set()
        watched = self._watched.get(process.pid)
        # Otherwise a later process had the watched pid, and the watched one's end was reported before. If no descriptor
        # was left to read its start time with, it counts as the watched one: a missed end is waited for for ever.
        if watched is not None and process.is_same(Process(process.pid, watched.start_time)):
            del self._watched[process.pid]
            watched.on_exit(status)
        else:
            self._unclaimed.append((process, status))


def spawn_process(arguments: Sequence[str], log: Path, fds: dict[int, int], environment: dict[str, str]) -> Process:
    """Start a Python process in a session of its own, so that a terminal's Ctrl-C does not reach it.

    stdin is empty, stdout and stderr append to `log`; `fds` maps numbers in the child to descriptors here.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        *((os.POSIX_SPAWN_DUP2, here, there) for there, here in fds.items()),
    ]
    pid = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=actions, setsid=True)
    # It cannot have been reaped yet: only the event loop's own callbacks do that.
    return Process.of(pid)


def actor_environment(num_threads: int) -> dict[str, str]:
    """Environment of all actors: threads do not spin on each other's cores, and the zygote, which forks, has none."""
    root = str(Path(cli.__file__).parents[1])
    # A checkout that is not installed: its root is on the path because `python -m cli` was run in it.
    is_checkout = root in map(os.path.abspath, sys.path) and root not in (*getsitepackages(), getusersitepackages())
    return {
        **TORCH_ENVIRONMENT,
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        # Otherwise `-m` imports a mesh.py or random.py of the working directory instead of our module or the library's.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (root if is_checkout else "", os.environ.get("PYTHONPATH")))),
        # After `os.environ`: with more, importing numpy would start threads in the zygote, which then could not fork.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        # Their logs are files, which `meshctl logs` reads and puts in order.
        "KVMESH_LOG_FORMAT": "json",
    }


def become_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 characters."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), f"prctl({option})")
