"""Limits that the system sets to a process, its user or its control group: which there are, what they are now, and
which of them an error, or the last words of a process that was aborted, is about.

This is the only place that makes a limit of an error. It goes by the words of the system's own messages, since these
also reach whoever has nothing else: libraries abort (ZeroMQ where it gets no thread, C++ where it gets no memory), and
their last line is in a log.
"""

import contextlib
import os
import resource
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from mesh.errors import LimitReached


class Limit(NamedTuple):
    """One limit. `shown_by` prints its value, in units of `unit_bytes` (0: a number); `do` raises it to N."""

    name: str
    shown_by: str
    do: str
    number: int = -1
    unit_bytes: int = 0

    def amount(self, value: int) -> str:
        """A value in the words of `shown_by`."""
        return f"{value // self.unit_bytes:,} KiB" if self.unit_bytes else f"{value:,}"


_KIB: Final = 1024

FILES: Final = Limit(
    "open files",
    "ulimit -n",
    "`ulimit -n N`, systemd: LimitNOFILE=N, docker: --ulimit nofile=N",
    resource.RLIMIT_NOFILE,
)
PROCESSES: Final = Limit(
    "processes and threads of this user", "ulimit -u",
    "`ulimit -u N`, systemd: LimitNPROC=N, docker: --ulimit nproc=N", resource.RLIMIT_NPROC,
)  # fmt: skip
TASKS: Final = Limit(
    "processes and threads of this control group", "cat pids.max", "systemd: TasksMax=N, docker: --pids-limit N"
)
ADDRESS_SPACE: Final = Limit(
    "address space", "ulimit -v", "`ulimit -v unlimited`, systemd: LimitAS=infinity", resource.RLIMIT_AS, _KIB
)
DATA: Final = Limit(
    "data segment", "ulimit -d", "`ulimit -d unlimited`, systemd: LimitDATA=infinity", resource.RLIMIT_DATA, _KIB
)
STACK: Final = Limit(
    "stack", "ulimit -s", "`ulimit -s 8192`, systemd: LimitSTACK=8M, docker: --ulimit stack=8388608",
    resource.RLIMIT_STACK, _KIB,
)  # fmt: skip
FILE_SIZE: Final = Limit(
    "size of a file", "ulimit -f", "`ulimit -f unlimited`, systemd: LimitFSIZE=infinity", resource.RLIMIT_FSIZE, _KIB
)
LOCKED: Final = Limit(
    "locked memory", "ulimit -l", "`ulimit -l unlimited`, systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1",
    resource.RLIMIT_MEMLOCK, _KIB,
)  # fmt: skip
CPU_TIME: Final = Limit(
    "seconds of CPU time", "ulimit -t", "`ulimit -t unlimited`, systemd: LimitCPU=infinity", resource.RLIMIT_CPU
)
FILES_OF_ALL: Final = Limit("open files of the whole machine", "sysctl fs.file-max", "`sysctl fs.file-max=N`")

LIMITS: Final = (
    FILES, PROCESSES, TASKS, ADDRESS_SPACE, DATA, STACK, FILE_SIZE, LOCKED, CPU_TIME, FILES_OF_ALL,
)  # fmt: skip
RAISED: Final = (FILES, PROCESSES)
"""Whose soft limit a mesh raises to the hard one: shells and systemd set them low for old programs (`select`), not to
save anything. The others are lowered by somebody who means it."""

MAX_FILES: Final = 65_536
"""Twice what 4,096 peers take at 8 descriptors each; the other half is left for clients' connections (16,384)."""
LEAST_PEERS: Final = 2
"""A supervisor and a registry; with fewer an actor is no use."""
OWN_FILES: Final = 64
"""An actor at rest without peers has 34: logs, bound sockets, ZeroMQ's own, the event loop's. 16 must be free for a
dial to be tried (`mesh/transport/zeromq.py`), and the rest is for files that are read."""
PEER_FILES: Final = 10
"""Eight for a peer that is dialed: two sockets, with those by which ZeroMQ wakes itself; two for one that dials."""

SMALL_STACK_BYTES: Final = 256 * _KIB
"""Threads get stacks of this size, the main thread at most so much; importing torch with 128 KiB is a SIGSEGV."""
_NEARLY: Final = 32
"""A limit that others share counts as reached if so little is left: what failed has ended meanwhile, an actor's threads
included."""

_CAP_SYS_ADMIN: Final = 21
"""linux/capability.h, both."""
_CAP_SYS_RESOURCE: Final = 24
_SELF: Final = Path("/proc/self")
_CGROUP: Final = _SELF / "cgroup"
_CGROUPS: Final = Path("/sys/fs/cgroup")
"""The hierarchy of version 2; of version 1 each controller has a folder there."""

_THREADS: Final = (TASKS, PROCESSES, ADDRESS_SPACE, DATA)
_MEMORY: Final = (ADDRESS_SPACE, DATA)
_WORDS: Final[Mapping[str, tuple[Limit, ...]]] = {
    # ENFILE first: its words begin with those of EMFILE.
    "Too many open files in system": (FILES_OF_ALL,),
    "Too many open files": (FILES,),
    "File too large": (FILE_SIZE,),
    "SIGXFSZ": (FILE_SIZE,),
    "SIGXCPU": (CPU_TIME,),
    # Of fork and ZeroMQ, which aborts the process; of Python; of OpenMP.
    "Resource temporarily unavailable": _THREADS,
    "can't start new thread": _THREADS,
    "Thread creation failed": _THREADS,
    "Cannot allocate memory": _MEMORY,
    "MemoryError": _MEMORY,
    "bad_alloc": _MEMORY,
    "failed to map segment": _MEMORY,
    "can't allocate memory": _MEMORY,
    "memory allocation of": _MEMORY,
    # Stacks overflow, and libraries that get no memory use what they did not get, or abort.
    "SIGSEGV": (STACK, *_MEMORY),
    "SIGABRT": _MEMORY,
}
"""What is said where a limit is reached, and which it may be."""


class Limits(NamedTuple):
    """What is in force. `values` has only limits that there are: what is left out is unlimited, or binds nobody here.

    `used` is what others have of those that are shared (`PROCESSES`, `TASKS`).
    """

    values: Mapping[Limit, int]
    used: Mapping[Limit, int]

    def left(self, limit: Limit) -> int | None:
        """How much is left; None for any amount."""
        value = self.values.get(limit)
        return None if value is None else max(0, value - self.used.get(limit, 0))

    def met_in(self, words: str) -> Limit | None:
        """The limit that an error's words are about; None if they are about none of those in force."""
        for said, candidates in _WORDS.items():
            if said in words:
                return next((limit for limit in candidates if self._may_be(limit)), None)
        return None

    def _may_be(self, limit: Limit) -> bool:
        left = self.left(limit)
        if left is None:
            return False
        if limit is STACK:
            return left < SMALL_STACK_BYTES
        return limit not in self.used or left < _NEARLY

    def explain(self, limit: Limit) -> str:
        """Its name, its value, and how to raise it, as the end of a sentence."""
        used = f" and {self.used[limit]:,} are there" if limit in self.used else ""
        value = limit.amount(self.values[limit])
        return f"the limit of {limit.name} (`{limit.shown_by}`) is {value}{used}: raise it by {limit.do}"


def read_limits() -> Limits:
    """Those of this process. Takes a millisecond, and some more where the number of processes is limited."""
    values: dict[Limit, int] = {}
    used: dict[Limit, int] = {}
    for limit in LIMITS:
        if limit.number >= 0 and (soft := resource.getrlimit(limit.number)[0]) != resource.RLIM_INFINITY:
            values[limit] = soft
    if PROCESSES in values:
        if _is_exempt():
            del values[PROCESSES]
        else:
            used[PROCESSES] = _tasks_of_user()
    if (group := _tasks_of_group()) is not None:
        values[TASKS], used[TASKS] = group
    with contextlib.suppress(OSError, ValueError):
        values[FILES_OF_ALL] = int(Path("/proc/sys/fs/file-max").read_text())
    return Limits(values, used)


def raise_limits() -> None:
    """Raise the soft limits of descriptors and processes; what this process starts inherits them."""
    for limit in RAISED:
        soft, hard = resource.getrlimit(limit.number)
        wanted = hard
        if limit is FILES:
            wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or soft < wanted):
            resource.setrlimit(limit.number, (wanted, hard))


def peers_that_fit(most: int) -> int:
    """How many peers this process has descriptors for, `most` at most. Raises LimitReached for fewer than two.

    More are refused: where ZeroMQ gets no descriptor for a connection within the host, it aborts the process.
    """
    num_files = resource.getrlimit(FILES.number)[0]
    num_peers = most if num_files == resource.RLIM_INFINITY else min(most, (num_files - OWN_FILES) // PEER_FILES)
    if num_peers < min(most, LEAST_PEERS):
        raise LimitReached(f"{LEAST_PEERS} peers do not fit: {read_limits().explain(FILES)}")
    return num_peers


def limit_met(error: BaseException) -> LimitReached | None:
    """The limit that this error, or what led to it, is about; None if it is about none."""
    met = error
    while met is not None:
        if isinstance(met, LimitReached):
            return met
        words = f"{type(met).__name__}: {met}"
        limits = read_limits()
        if (limit := limits.met_in(words)) is not None:
            said = met.strerror if isinstance(met, OSError) and met.strerror else words
            return LimitReached(f"{said}; {limits.explain(limit)}")
        met = met.__cause__ or met.__context__
    return None


def require_room(num_files: int, num_threads: int) -> None:
    """Raise LimitReached if this process cannot have so many more descriptors and threads, now and at once.

    By trying, which takes 0.1 ms: what others take of the limits that are shared is known to the kernel alone.
    """
    taken: list[int] = []
    waiting: list[threading.Thread] = []
    let_go = threading.Event()
    try:
        for _ in range(num_files):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - those there are, are closed
        for _ in range(num_threads):
            thread = threading.Thread(target=let_go.wait, daemon=True)
            thread.start()
            waiting.append(thread)
    except (OSError, RuntimeError, MemoryError) as error:
        # Before asking what the limit is, which takes a descriptor.
        _release(taken, waiting, let_go)
        if (met := limit_met(error)) is not None:
            raise met from error
        raise
    finally:
        _release(taken, waiting, let_go)


def _release(taken: list[int], waiting: list[threading.Thread], let_go: threading.Event) -> None:
    let_go.set()
    while taken:
        os.close(taken.pop())
    while waiting:
        waiting.pop().join()


def _is_exempt() -> bool:
    """Whether the kernel counts no processes of this user: the machine's root, or with one of two capabilities."""
    try:
        mapped = (_SELF / "uid_map").read_text().split()
        status = (_SELF / "status").read_text()
    except OSError:
        return False
    # In a user namespace, root is some user of the machine.
    if mapped != ["0", "0", "4294967295"]:
        return False
    capabilities = int(status.partition("CapEff:")[2].split(maxsplit=1)[0], 16)
    return os.getuid() == 0 or bool(capabilities & (1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE))


def _tasks_of_user() -> int:
    """Processes and threads of this user that can be seen here; a user may have more in other pid namespaces."""
    num, uid = 0, os.getuid()
    try:
        names = os.listdir("/proc")
    except OSError:
        # No descriptor is left.
        return 0
    for name in names:
        if name.isdigit():
            try:
                tasks = os.stat(f"/proc/{name}/task")
            except OSError:
                # It has just ended.
                continue
            # `.`, `..` and a directory for each thread.
            num += tasks.st_nlink - 2 if tasks.st_uid == uid else 0
    return num


def _tasks_of_group() -> tuple[int, int] | None:
    """The limit of the control group that has least left, and what is used of it; None without any."""
    try:
        lines = _CGROUP.read_text().splitlines()
    except OSError:
        return None
    found: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / controllers
        if controllers not in ("", "pids"):
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's, and only the root is here.
        for at in (group, *group.parents):
            if at == root.parent:
                break
            try:
                found.append((int((at / "pids.max").read_text()), int((at / "pids.current").read_text())))
            except (OSError, ValueError):
                # The root of the hierarchy has none, and `max` is no number.
                continue
    return min(found, key=lambda one: one[0] - one[1], default=None)
