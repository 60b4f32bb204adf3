"""`meshctl down`: stop a mesh, and remove what one left whose supervisor is dead."""

import contextlib
import os
import signal
import sys
import time

from cli.client import ask_supervisor
from cli.errors import BadManifest, NotRunning, TimedOut
from cli.exit_codes import ExitCode
from cli.launch.mesh_directory import Manifest, MeshDirectory
from cli.launch.processes import open_process, wait_dead
from cli.launch.sweep import sweep
from cli.protocol import StopMesh, Stopping

_KILL_TIMEOUT_S = 5.0


def down(name: str, *, force: bool, timeout_s: float) -> ExitCode:
    """Stop the mesh and wait until its supervisor is gone. Raises NotRunning or TimedOut."""
    directory = MeshDirectory(name)
    manifest, damage = _look_up(directory)
    # Where no manifest says who the supervisor is, its lock does: it is starting, or the manifest was damaged.
    named = manifest or directory.holder()
    supervisor = open_process(named.pid, named.start_time) if named is not None else None
    if supervisor is None:
        if manifest is None and damage is None:
            raise NotRunning(f"no mesh named {name!r} is running", do="`meshctl ps --name NAME` shows one that is")
        return _sweep(directory)
    assert named is not None, "a process was opened by its pid"
    try:
        _ask_to_stop(directory, manifest, named.pid, supervisor, force)
        began = time.monotonic()
        if not wait_dead(supervisor, timeout_s):
            if not force:
                raise TimedOut(
                    f"the mesh {name!r} has not stopped within {timeout_s:g} s",
                    why="actors are still finishing what they have",
                    do="wait, or kill them with --force",
                )
            signal.pidfd_send_signal(supervisor, signal.SIGKILL)
            wait_dead(supervisor, _KILL_TIMEOUT_S)
            return _sweep(directory)
    finally:
        os.close(supervisor)
    sys.stderr.write(f"{name} stopped in {time.monotonic() - began:.1f} s\n")
    return ExitCode.OK


def _look_up(directory: MeshDirectory) -> tuple[Manifest | None, BadManifest | None]:
    """The manifest, or what is wrong with it."""
    try:
        return directory.load_manifest(), None
    except BadManifest as error:
        sys.stderr.write(f"{error.what}: {error.why}\n")
        return None, error


def _ask_to_stop(directory: MeshDirectory, manifest: Manifest | None, pid: int, supervisor: int, force: bool) -> None:
    if manifest is not None:
        try:
            ask_supervisor(directory, manifest, StopMesh(reason="meshctl down", force=force), Stopping)
        except NotRunning:
            # It may be busy, or its sockets gone; a signal reaches it all the same.
            sys.stderr.write("the supervisor does not answer; ")
        else:
            return
    sys.stderr.write(f"process {pid} gets a signal instead\n")
    with contextlib.suppress(ProcessLookupError):
        for _ in range(2 if force else 1):
            signal.pidfd_send_signal(supervisor, signal.SIGTERM)


def _sweep(directory: MeshDirectory) -> ExitCode:
    with directory.locked():
        for left in sweep(directory):
            sys.stderr.write(f"removed what a dead supervisor left: {left}\n")
    return ExitCode.OK
