"""What `meshctl doctor` makes of the facts about a machine: for each check a verdict, and what to do. Pure.

`machine.py` gathers the facts. Nothing here looks at the machine, so each verdict is tested without its condition.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from cli.doctor.versions import satisfies
from cli.plan.limits import Shortfall
from mesh.runtime.process_limits import (
    ADDRESS_SPACE,
    CPU_TIME,
    DATA,
    FILE_SIZE,
    FILES,
    LOCKED,
    MAX_FILES,
    PROCESSES,
    STACK,
    TASKS,
    Limits,
)
from nodes.amounts import amount
from nodes.worker.ops.native.sources import BUILDS

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"
State = Literal["ok", "warn", "fail"]

_FULL_SHARE: Final = 0.8
"""As in `cli/plan/pools.py`: the rest is for other segments, as a write there that does not fit is a SIGBUS."""
_EARLIEST: Final = 1_767_225_600.0
"""2026-01-01: a clock before it was never set, and certificates, of the hub for example, are not valid yet."""
_MAX_AHEAD_S: Final = 60.0
"""Epochs count up by restarts too, one a second at most; more means that the clock was ahead, or is behind now."""
_MAX_DRIFT_S: Final = 0.02
"""In the 0.05 s of a look. An NTP daemon slews a clock by 0.05 % at most; a step is much more."""
_FAST_CLOCKS: Final = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen")
"""Clock sources that are read without a system call, in some 25 ns; the others take a microsecond or more."""
_SHOWN: Final = (FILES, PROCESSES, TASKS, STACK, FILE_SIZE)
"""Limits that are often there and name a number that one may want to know."""
_MODE_OF_OTHERS: Final = 0o077
_WRITABLE_BY_OTHERS: Final = 0o022


class Finding(NamedTuple):
    """One line. `do` is empty if nothing is to be done."""

    check: str
    state: State
    found: str
    do: str = ""


class Fault(NamedTuple):
    """An error of `meshctl up`, in its words. `is_memory`: the pools do not fit."""

    found: str
    do: str
    is_memory: bool = False
    is_certain: bool = True


class SharedMemory(NamedTuple):
    """Where KV pools lie. `pool_bytes` is what those of the settings in force take; None: none, or not known."""

    directory: str
    free_bytes: int
    total_bytes: int
    is_tmpfs: bool
    pool_bytes: int | None


class ProcessLimits(NamedTuple):
    """`values` are in force, `shortfalls` those too low for a mesh here. `is_on_device`: pools lie on a device."""

    values: Limits
    shortfalls: Sequence[Shortfall]
    is_on_device: bool


class Kernels(NamedTuple):
    """`builds` has why each build that this CPU could run cannot be used; empty if it can. Fastest first."""

    architecture: str
    has_any: bool
    builds: Mapping[str, str]


class Clock(NamedTuple):
    """`wall_s` is Unix time, `drift_s` by how much it moved more than the monotonic clock while both were watched."""

    wall_s: float
    drift_s: float
    source: str
    last_epoch: int


class Port(NamedTuple):
    """One that this host's part of the mesh listens on. `error` is why it cannot; `is_own`: its running mesh does."""

    what: str
    address: str
    error: str = ""
    do: str = ""
    holder: str = ""
    is_own: bool = False


class Path(NamedTuple):
    """A file or directory that is there. `is_secret`: nobody else may read it; anybody may read the others."""

    what: str
    path: str
    uid: int
    mode: int
    is_secret: bool = True


class Library(NamedTuple):
    """A requirement; `installed` is "" if it is not there, `extra` what needs it, "" if everything does."""

    name: str
    wanted: str
    installed: str
    extra: str = ""


class Facts(NamedTuple):
    """Everything that is looked at. `fault`: why `up` would refuse the settings in force."""

    uid: int
    is_running: bool
    fault: Fault | None
    memory: SharedMemory | None
    limits: ProcessLimits
    kernels: Kernels
    clock: Clock
    ports: Sequence[Port]
    paths: Sequence[Path]
    socket_bytes: tuple[int, int]
    libraries: Sequence[Library]


def check(facts: Facts) -> list[Finding]:
    """All findings, at least one for each check, in a fixed order."""
    return [
        *_configuration(facts),
        *_memory(facts),
        *_limits(facts.limits, facts.memory),
        *_kernels(facts.kernels),
        *_clock(facts.clock),
        *(_port(port) for port in facts.ports),
        *_rights(facts),
        *_versions(facts.libraries),
    ]


def _configuration(facts: Facts) -> list[Finding]:
    fault = facts.fault
    if fault is None or fault.is_memory:
        return [Finding("configuration", OK, "`meshctl up` accepts it")]
    return [Finding("configuration", FAIL if fault.is_certain else WARN, fault.found, fault.do)]


def _memory(facts: Facts) -> list[Finding]:
    name, memory, fault = "shared memory", facts.memory, facts.fault
    if memory is None:
        return [Finding(name, OK, "not needed: this host has no KV pools")]
    found = f"{memory.directory} has {amount(memory.free_bytes)} free of {amount(memory.total_bytes)}"
    if facts.is_running:
        return [Finding(name, OK, f"{found}, beside the pools of the mesh that runs")]
    if fault is not None and fault.is_memory:
        return [Finding(name, FAIL, fault.found, fault.do)]
    if not memory.is_tmpfs:
        do = "set [kv] directory to a directory in memory (a tmpfs), such as /dev/shm"
        return [Finding(name, WARN, f"{memory.directory} is on a disk, which KV pools there are written to", do)]
    if memory.pool_bytes is None:
        return [Finding(name, OK, found)]
    found += f"; the pools take {amount(memory.pool_bytes)}"
    if memory.pool_bytes > memory.free_bytes * _FULL_SHARE:
        do = "make it larger (docker: --shm-size), or the pools smaller with --kv-memory"
        return [Finding(name, WARN, f"{found}, which leaves little for anything else there", do)]
    return [Finding(name, OK, found)]


def _limits(limits: ProcessLimits, memory: SharedMemory | None) -> list[Finding]:
    values, short = limits.values.values, {one.limit: one for one in limits.shortfalls}
    found = [Finding(limit.name, FAIL, one.found, one.do) for limit, one in short.items()]
    files = values.get(FILES)
    if FILES not in short and files is not None and files < MAX_FILES:
        few = f"{files:,} at most, where a peer takes ten and each client one: connections are refused beyond it"
        found.append(Finding(FILES.name, WARN, few, f"raise it to {MAX_FILES}: {FILES.do}"))
    locked, needed = values.get(LOCKED), memory.pool_bytes or 0 if memory is not None else 0
    if limits.is_on_device and locked is not None and locked < max(needed, 1):
        do = f"raise it if pages are moved by RDMA: {LOCKED.do}"
        found.append(Finding(LOCKED.name, WARN, f"{amount(locked)} at most: RDMA cannot register KV pools", do))
    if CPU_TIME in values:
        text = f"{values[CPU_TIME]:,} at most, after which the kernel kills an actor, whatever it does"
        found.append(Finding(CPU_TIME.name, WARN, text, CPU_TIME.do))
    for limit in (ADDRESS_SPACE, DATA):
        if limit in values and limit not in short:
            text = f"{amount(values[limit])} at most: enough to start, but weights and libraries may need more"
            found.append(Finding(limit.name, WARN, text, limit.do))
    shown = [f"{limit.name} {limit.amount(value)}" for limit, value in values.items() if limit in _SHOWN]
    return found or [Finding("limits", OK, f"enough for a mesh here: {'; '.join(shown) or 'there are none'}")]


def _kernels(kernels: Kernels) -> list[Finding]:
    name = "kernels"
    if not kernels.has_any:
        found = f"there are no native kernels for {kernels.architecture}: torch computes, which is slower"
        return [Finding(name, WARN, found)]
    if not kernels.builds:
        return [Finding(name, WARN, "this CPU has no AVX2: torch computes, which is slower")]
    usable = [build for build, why in kernels.builds.items() if not why]
    best, why = next(iter(kernels.builds.items()))
    cannot = [build for build in BUILDS if build not in kernels.builds]
    rest = f"; this CPU cannot run {', '.join(cannot)}" if cannot else ""
    if not why:
        return [Finding(name, OK, f"{best} is built{rest}")]
    instead = f"{usable[0]} is used" if usable else "torch computes, which is much slower"
    what, _, do = why.partition("; ")
    return [Finding(name, WARN, f"{what}: {instead}, though this CPU can run {best}", do or "run make setup")]


def _clock(clock: Clock) -> list[Finding]:
    name, do = "clock", "set it, and have it kept right (NTP)"
    if clock.wall_s < _EARLIEST:
        return [Finding(name, FAIL, "it shows a date before 2026, so it was never set", do)]
    found: list[Finding] = []
    if (ahead_s := clock.last_epoch - clock.wall_s) > _MAX_AHEAD_S:
        # Epochs go on all the same, but a host that loses its files then begins below those that others know.
        text = f"epochs of this mesh are {ahead_s:,.0f} s ahead of it: it was wrong then, or is behind now"
        found.append(Finding(name, WARN, text, do))
    if abs(clock.drift_s) > _MAX_DRIFT_S:
        text = f"it moved by {clock.drift_s:+.3f} s against the monotonic clock within a moment: it is being set"
        found.append(Finding(name, WARN, text, "see what sets it: deadlines are monotonic, but logs will not be"))
    if clock.source and clock.source not in _FAST_CLOCKS:
        text = f"its source is {clock.source}, which takes microseconds to read"
        found.append(Finding(name, WARN, text, "see why the kernel does not trust tsc (dmesg | grep -i tsc)"))
    return found or [Finding(name, OK, "the wall clock is plausible, and goes as the monotonic one does")]


def _port(port: Port) -> Finding:
    name = f"port of the {port.what}"
    if port.is_own:
        return Finding(name, OK, f"{port.address} is held by this mesh ({port.holder})")
    if not port.error:
        return Finding(name, OK, f"{port.address} is free")
    by = f", held by {port.holder}" if port.holder else ""
    return Finding(name, FAIL, f"{port.address}: {port.error}{by}", port.do)


def _rights(facts: Facts) -> list[Finding]:
    name, found = "rights", list[Finding]()
    for path in facts.paths:
        if path.uid != facts.uid:
            text = f"{path.what} {path.path} belongs to user {path.uid}, not to this one ({facts.uid})"
            found.append(Finding(name, FAIL, text, "make this user its owner, or name another"))
        elif path.is_secret and path.mode & _MODE_OF_OTHERS:
            text = f"{path.what} {path.path} is open to other users ({path.mode:04o})"
            found.append(Finding(name, FAIL, text, f"chmod go-rwx {path.path}"))
        elif path.mode & _WRITABLE_BY_OTHERS:
            text = f"{path.what} {path.path} may be changed by other users ({path.mode:04o})"
            found.append(Finding(name, WARN, text, f"chmod go-w {path.path}"))
    length, most = facts.socket_bytes
    if length > most:
        text = f"the run directory makes paths of sockets of {length} bytes, and the kernel takes {most}"
        found.append(Finding(name, FAIL, text, "set XDG_RUNTIME_DIR to a shorter directory, or give a shorter --name"))
    num = len(facts.paths)
    return found or [Finding(name, OK, f"run directory and keys are this user's alone ({num} looked at)")]


def _versions(libraries: Sequence[Library]) -> list[Finding]:
    name, found = "versions", list[Finding]()
    if not libraries:
        return [Finding(name, WARN, "kvmesh is not installed, so what it needs is not known", "pip install it")]
    for library in libraries:
        if not library.installed:
            if not library.extra:
                text = f"{library.name} is not installed ({library.wanted or 'any version'} is needed)"
                found.append(Finding(name, FAIL, text, f"pip install '{library.name}{library.wanted}'"))
        elif not satisfies(library.installed, library.wanted):
            by = f" by the extra {library.extra}" if library.extra else ""
            text = f"{library.name} {library.installed} is installed; {library.wanted} is asked for{by}"
            do = f"pip install '{library.name}{library.wanted}'"
            found.append(Finding(name, WARN if library.extra else FAIL, text, do))
    there = sum(bool(library.installed) for library in libraries)
    return found or [Finding(name, OK, f"{there} libraries, all in the ranges that kvmesh asks for")]
