"""What a supervisor of the mesh `m` writes down of itself and of its processes."""

import os
from typing import Any, Protocol

from cli.supervisor.kept.mesh_directory import Manifest, MeshDirectory, ProcessRecord, segment_prefix
from cli.supervisor.processes.by_pid import start_time

PREFIX = segment_prefix(os.getuid(), "m")
NO_PID = 2**22 - 1


class HasPid(Protocol):
    """A process that was started."""

    pid: int


def manifest(directory: MeshDirectory, by: HasPid | None = None, **fields: Any) -> Manifest:
    """A sound one, of the supervisor `by`, or of one that is dead."""
    pid, start = (NO_PID, 1) if by is None else (by.pid, start_time(by.pid))
    sound = {
        "mesh": "m", "pid": pid, "start_time": start, "epoch": 1, "control": "ipc:///c", "data": "ipc:///d",
        "url": "http://x", "pool_directory": str(directory.path), "pool_prefix": PREFIX,
    }  # fmt: skip
    return Manifest(**(sound | fields))


def record(process: HasPid, **fields: Any) -> ProcessRecord:
    """Of an actor that this process is."""
    known = {"actor_id": "a", "role": "r", "pid": process.pid, "start_time": start_time(process.pid)}
    return ProcessRecord(**(known | fields))
