"""Gathers what `checks.py` judges, on this machine and for the settings in force. Starts nothing, changes nothing."""

import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from cli.commands.up import check_port, plan
from cli.doctor import checks
from cli.doctor.checks import Clock, Facts, Fault, Kernels, Library, Port, ProcessLimits, SharedMemory
from cli.errors import CannotBind, CliError, NoMemory
from cli.plan.keys import key_directory
from cli.plan.limits import LEAST, shortfalls
from cli.plan.model import ModelNotHere
from cli.plan.settings import Settings
from cli.plan.topology import Topology
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.processes.by_pid import is_alive
from cli.supervisor.told.progress import Progress
from kvstore.pool.device import CPU
from mesh.runtime.process_limits import read_limits
from mesh.runtime.run_directory import MAX_SOCKET_PATH_BYTES
from nodes.worker.ops.native.builds import BuildUnfit, cpu_flags, load_build, path_of
from nodes.worker.ops.native.sources import BUILDS, has_builds

_WATCH_S: Final = 0.05
"""How long both clocks are watched: a step is seen at once, and nobody notices the time."""
_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_MOUNTS: Final = Path("/proc/self/mounts")
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")
_LISTENS: Final = "0A"
_LONGEST_SOCKET: Final = "scheduler-prefill-00.00000000000.c"
"""An actor id with its epoch and channel, as long as those of a large mesh's own actors are."""
_EXTRAS: Final = ("cuda12", "cuda13")
_REQUIREMENT: Final = re.compile(r"""^([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;.*extra == "([\w-]+)")?""")


def look(settings: Settings, environment: Mapping[str, str]) -> Facts:
    """What this machine and these settings are like. Takes some 50 ms, or seconds for a large model's tokenizer."""
    directory = MeshDirectory(settings.name)
    manifest = directory.read_manifest()
    is_running = manifest is not None and is_alive(manifest.pid, manifest.start_time)
    own = {process.pid for process in manifest.processes} | {manifest.pid} if is_running and manifest else set[int]()
    fault, topology = _plan(settings, is_running=is_running)
    pool_bytes = topology.pool_bytes if topology is not None else None
    return Facts(
        uid=os.getuid(),
        is_running=is_running,
        fault=fault,
        memory=_memory(settings, pool_bytes),
        limits=_limits(settings, topology, is_running=is_running),
        kernels=_kernels(),
        clock=_clock(directory),
        ports=[*_ports(settings, own)],
        paths=[*_paths(settings, directory, environment)],
        socket_bytes=(len(os.fsencode(directory.run.sockets / _LONGEST_SOCKET)), MAX_SOCKET_PATH_BYTES - 1),
        libraries=[*_libraries()],
    )


def _plan(settings: Settings, *, is_running: bool) -> tuple[Fault | None, Topology | None]:
    try:
        return None, plan(settings, Progress(None), fetches=False, checks_limits=False)
    except CliError as error:
        is_memory = isinstance(error, NoMemory)
        if is_memory and is_running:
            # Its own pools are what takes the room.
            return None, None
        is_certain = not isinstance(error, ModelNotHere)
        return Fault(f"{error.what}: {error.why}", error.do, is_memory=is_memory, is_certain=is_certain), None


def _memory(settings: Settings, pool_bytes: int | None) -> SharedMemory | None:
    directory = os.path.abspath(os.path.expanduser(settings.kv.directory))
    try:
        status = os.statvfs(directory)
    except OSError:
        # The plan has failed for that, and says so.
        return None
    if pool_bytes == 0:
        return None
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    return SharedMemory(directory, free, total, _file_system(directory) in ("", *_IN_MEMORY), pool_bytes)


def _file_system(directory: str) -> str:
    """The kind of file system that a directory is on; "" if that cannot be found out."""
    try:
        mounts = [line.split(" ")[1:3] for line in _MOUNTS.read_text().splitlines()]
    except (OSError, IndexError):
        return ""
    real = os.path.realpath(directory)
    above = [(len(at), kind) for at, kind in mounts if real == at or real.startswith(at.rstrip("/") + "/")]
    return max(above, default=(0, ""))[1]


def _limits(settings: Settings, topology: Topology | None, *, is_running: bool) -> ProcessLimits:
    limits = read_limits()
    needed = [*LEAST] if topology is None else topology.needs
    if is_running:
        # It has its processes.
        needed = [need for need in needed if need.limit not in limits.used]
    return ProcessLimits(limits, shortfalls(needed, limits), settings.device != CPU)


def _kernels() -> Kernels:
    builds: dict[str, str] = {}
    for name, build in BUILDS.items() if has_builds() else ():
        if not cpu_flags().issuperset(build.needs):
            continue
        builds[name] = ""
        try:
            load_build(name, path_of(name))
        except BuildUnfit as error:
            builds[name] = str(error)
    return Kernels(platform.machine(), has_builds(), builds)


def _clock(directory: MeshDirectory) -> Clock:
    wall_s, monotonic_s = time.time(), time.monotonic()
    time.sleep(_WATCH_S)
    drift_s = (time.time() - wall_s) - (time.monotonic() - monotonic_s)
    try:
        source = _SOURCE.read_text().strip()
    except OSError:
        source = ""
    return Clock(time.time(), drift_s, source, max(directory.epochs().values(), default=0))


def _ports(settings: Settings, own: Iterable[int]) -> Iterator[Port]:
    wanted: list[tuple[str, str, int]] = []
    here = settings.own_host
    if here is not None and settings.on == settings.registry_host:
        wanted += [("registry", here.bind, port) for port in (settings.registry_port, settings.registry_port + 1)]
    if settings.own_counts.gateways:
        wanted.append(("gateway", settings.host, settings.port))
    for what, host, number in wanted:
        address = f"{host}:{number}"
        try:
            check_port(host, number)
        except CannotBind as error:
            pid, holder = holder_of(number)
            yield Port(what, address, error.why, error.do, holder, is_own=pid in own)
        else:
            yield Port(what, address)


def holder_of(port: int) -> tuple[int, str]:
    """The process that listens on a TCP port, as `NAME, process N`; (0, "") if there is none, or none of this user."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        fields = [line.split() for line in lines]
        inodes |= {f"socket:[{one[9]}]" for one in fields if one[3] == _LISTENS and one[1].endswith(f":{port:04X}")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                return int(process.name), f"{(process / 'comm').read_text().strip()}, process {process.name}"
        except OSError:
            # Another user's, or it has just ended.
            continue
    return 0, ""


def _paths(settings: Settings, directory: MeshDirectory, environment: Mapping[str, str]) -> Iterator[checks.Path]:
    keys = key_directory(settings, environment)
    secret = {
        "run directory": [directory.path.parent, directory.path, directory.run.sockets],
        "key file": [keys / "host.json", keys / "allowed.json"],
        "file of API keys": [Path(settings.api_key_file).expanduser()] if settings.api_key_file else [],
    }
    for what, paths in secret.items():
        for path in paths:
            try:
                status = path.lstat()
            except OSError:
                # It is made when it is needed.
                continue
            # What is above the run directory may be the system's, as /run/user/1000 is of systemd.
            if path != directory.path.parent or status.st_uid not in (0, os.getuid()):
                yield checks.Path(what, str(path), status.st_uid, status.st_mode & 0o7777)


def _libraries() -> Iterator[Library]:
    try:
        kvmesh = metadata.distribution("kvmesh")
    except metadata.PackageNotFoundError:
        return
    wanted = str(kvmesh.metadata["Requires-Python"] or "")
    yield Library("python", wanted, ".".join(map(str, sys.version_info[:3])))
    for text in kvmesh.requires or ():
        found = _REQUIREMENT.match(text)
        if found is None or found[3] not in (None, *_EXTRAS):
            continue
        try:
            installed = metadata.version(found[1])
        except metadata.PackageNotFoundError:
            installed = ""
        yield Library(found[1], found[2].strip(), installed, found[3] or "")
