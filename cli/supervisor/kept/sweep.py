"""Removes what a dead supervisor left: processes, sockets, segments. Called under the mesh's lock.

Nothing else is ever killed (see `processes.py`) or removed: a manifest that cannot be trusted is not followed, and the
mesh's name tells which segments are its own.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from cli.errors import BadManifest
from cli.supervisor.kept.cut_calls import LEFT_BEHIND, dead_gateways, end_calls
from cli.supervisor.kept.mesh_directory import Manifest, MeshDirectory, ProcessRecord
from cli.supervisor.processes.by_pid import is_alive, open_process, wait_dead
from kvstore.pool.page_pool import ShmHost

_REAP_TIMEOUT_S = 10.0
"""Freeing a device's memory takes the driver seconds; what still lives then hangs in the kernel."""


def sweep(directory: MeshDirectory) -> list[str]:
    """Kill and remove all leftovers. Returns what was found, in words.

    Raises AlreadyRunning, before anything is touched, if the supervisor lives all the same: somebody removed its lock.
    """
    found: list[str] = []
    manifest: Manifest | None = None
    try:
        manifest = directory.load_manifest()
    except BadManifest as error:
        found.append(f"a manifest that cannot be used, so its actors are left to end by themselves ({error.why})")
    if manifest is not None:
        # This process has the lock, so if the supervisor lives, its lock was removed: its mesh must not be swept away.
        if manifest.pid != os.getpid() and is_alive(manifest.pid, manifest.start_time):
            raise directory.already_running()
        found += [f"process {record.pid} ({record.actor_id})" for record in kill_all(manifest.processes)]
    found += _remove_files(directory, manifest)
    for gateway in dead_gateways(directory.requests):
        # A full disk: what those calls were is lost with their lines.
        with contextlib.suppress(OSError):
            end_calls(directory.requests, directory.traces, gateway, LEFT_BEHIND)
    directory.remove_manifest()
    return found


def _remove_files(directory: MeshDirectory, manifest: Manifest | None) -> list[str]:
    found = _remove_all(_entries(directory.run.sockets), "socket")
    _remove_all([directory.run.registry_file, directory.api_keys], "file")
    host = ShmHost(directory.pool_directory() if manifest is None else manifest.pool_directory)
    return found + [
        f"segment {path}" for path in host.sweep(directory.segments() if manifest is None else manifest.pool_prefix)
    ]


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _remove_all(paths: Iterable[Path], kind: str) -> list[str]:
    found: list[str] = []
    for path in paths:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append(f"{kind} {path.name}, which cannot be removed: {error.strerror}")
        else:
            found.append(f"{kind} {path.name}")
    return found


def kill_all(records: list[ProcessRecord]) -> list[ProcessRecord]:
    opened: dict[int, ProcessRecord] = {}
    try:
        for record in records:
            descriptor = None if record.pid == os.getpid() else open_process(record.pid, record.start_time)
            if descriptor is not None:
                opened[descriptor] = record
                # It may end by itself at any moment.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        # One deadline for all: they die in parallel, and a process that waits for the kernel (a device's memory, NFS)
        # may take seconds.
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        for descriptor in opened:
            wait_dead(descriptor, deadline - time.monotonic())
        return list(opened.values())
    finally:
        for descriptor in opened:
            os.close(descriptor)
