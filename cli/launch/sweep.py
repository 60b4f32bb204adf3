"""Removes what a dead supervisor left: processes, sockets, segments. Called under the mesh's lock.

A pid is believed only together with the process's start time, checked after a pidfd holds the process fast, so nothing
else is ever killed.
"""

import os
import select
import signal
import time
from pathlib import Path

from cli.launch.mesh_directory import Manifest, MeshDirectory, ProcessRecord
from kvstore.page_pool import ShmHost

_REAP_TIMEOUT_S = 10.0


def start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may hold any character; the state, field 3, follows the last one.
    return int(stat.rpartition(")")[2].split()[19])


def sweep(directory: MeshDirectory) -> list[str]:
    """Kill and remove all leftovers; what was found, in words."""
    manifest = directory.read_manifest()
    found: list[str] = []
    if manifest is not None:
        found += [f"process {record.pid} ({record.actor_id})" for record in kill_all(manifest.processes)]
    found += _remove_files(directory, manifest)
    directory.remove_manifest()
    return found


def _remove_files(directory: MeshDirectory, manifest: Manifest | None) -> list[str]:
    found: list[str] = []
    for path in sorted(directory.run.sockets.iterdir()):
        path.unlink(missing_ok=True)
        found.append(f"socket {path.name}")
    directory.run.registry_file.unlink(missing_ok=True)
    for path in (directory.path / "errors").iterdir():
        path.unlink(missing_ok=True)
    if manifest is not None:
        found += [f"segment {path}" for path in ShmHost(manifest.pool_directory).sweep(manifest.pool_prefix)]
    return found


def kill_all(records: list[ProcessRecord]) -> list[ProcessRecord]:
    """Kill those that still live and wait until they are dead; which ones did."""
    opened: dict[int, ProcessRecord] = {}
    try:
        for record in records:
            descriptor = open_process(record.pid, record.start_time)
            if descriptor is not None:
                opened[descriptor] = record
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        for descriptor in opened:
            wait_dead(descriptor, deadline - time.monotonic())
        return list(opened.values())
    finally:
        for descriptor in opened:
            os.close(descriptor)


def open_process(pid: int, started: int) -> int | None:
    """A pidfd of the process with this pid and start time; None if it is gone. The caller closes it."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if start_time(pid) == started:
        return descriptor
    os.close(descriptor)
    return None


def wait_dead(descriptor: int, timeout_s: float) -> bool:
    """Wait until the process of a pidfd has ended; False if it still lives."""
    readable, _, _ = select.select([descriptor], [], [], max(0.0, timeout_s))
    return bool(readable)
