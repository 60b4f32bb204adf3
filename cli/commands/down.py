"""`meshctl down`: stop a mesh, and remove what one left whose supervisor is dead."""

import os
import signal
import sys
import time

from cli.client import ask_supervisor
from cli.errors import NotRunning, TimedOut
from cli.exit_codes import ExitCode
from cli.launch.mesh_directory import Manifest, MeshDirectory
from cli.launch.sweep import open_process, sweep, wait_dead
from cli.protocol import StopMesh, Stopping

_KILL_TIMEOUT_S = 5.0


def down(name: str, *, force: bool, timeout_s: float) -> ExitCode:
    """Stop the mesh and wait until its supervisor is gone. Raises NotRunning or TimedOut."""
    directory = MeshDirectory(name)
    manifest = directory.read_manifest()
    supervisor = open_process(manifest.pid, manifest.start_time) if manifest is not None else None
    if manifest is None:
        raise NotRunning(f"no mesh named {name!r} is running", do="`meshctl ps --name NAME` shows one that is")
    if supervisor is None:
        return _sweep(directory, manifest)
    try:
        _ask_to_stop(directory, manifest, supervisor, force)
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
            return _sweep(directory, manifest)
    finally:
        os.close(supervisor)
    sys.stderr.write(f"{name} stopped in {time.monotonic() - began:.1f} s\n")
    return ExitCode.OK


def _ask_to_stop(directory: MeshDirectory, manifest: Manifest, supervisor: int, force: bool) -> None:
    try:
        ask_supervisor(directory, manifest, StopMesh(reason="meshctl down", force=force), Stopping)
    except NotRunning:
        # It may be busy, or its sockets gone; a signal reaches it all the same.
        sys.stderr.write(f"the supervisor does not answer; process {manifest.pid} gets a signal instead\n")
        for _ in range(2 if force else 1):
            signal.pidfd_send_signal(supervisor, signal.SIGTERM)


def _sweep(directory: MeshDirectory, manifest: Manifest) -> ExitCode:
    with directory.locked():
        for left in sweep(directory):
            sys.stderr.write(f"removed what the dead supervisor {manifest.pid} left: {left}\n")
    return ExitCode.OK
