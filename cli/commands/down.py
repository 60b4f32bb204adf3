"""`meshctl down`: stop a mesh, or remove what a mesh left whose supervisor is dead."""

import contextlib
import os
import signal
import sys
import time

from cli.client import ASK_TIMEOUT_S, RunningMesh, find_mesh, not_running
from cli.errors import BadManifest, NotRunning, TimedOut
from cli.exit_codes import ExitCode
from cli.plan.names import supervisor_id
from cli.protocol import ActorList, ListActors, StopMesh, Stopping
from cli.supervisor.kept.mesh_directory import Manifest, MeshDirectory
from cli.supervisor.kept.sweep import sweep
from cli.supervisor.processes.by_pid import open_process, wait_dead

_KILL_TIMEOUT_S = 5.0
"""After SIGKILL only the kernel is waited for, which unmaps pools of gigabytes; the sweep looks again."""
_LOOK_S = 0.2
"""Each look asks the supervisor, in milliseconds; nobody notices that a command ends 0.2 s later."""
_FORCED_ASK_S = 1.5
"""A healthy supervisor answers in milliseconds. A forced end does not wait for one that hangs."""
_FORCED_SIGNAL_S = 5.0
"""For a supervisor that can only be signalled: a forced end kills its actors at once, so it takes about a second."""


def down(name: str, *, host: str = "", force: bool, timeout_s: float) -> ExitCode:
    """Stop the mesh, or of several hosts only `host` if it is given, and wait until its supervisor is gone.

    Raises NotRunning or TimedOut.
    """
    directory = MeshDirectory(name)
    manifest, is_damaged = _look_up(directory)
    if host and (manifest is None or manifest.supervisor_id != supervisor_id(host)):
        return _down_other(name, StopMesh(reason="meshctl down", force=force, host=host), timeout_s)
    # If no manifest says who the supervisor is, its lock does: it is starting, or the manifest was damaged.
    named = manifest or directory.holder()
    supervisor = open_process(named.pid, named.start_time) if named is not None else None
    if supervisor is None:
        if manifest is None and not is_damaged:
            raise not_running(name)
        return _sweep(directory)
    assert named is not None, "a process was opened by its pid"
    mesh = RunningMesh(directory, manifest) if manifest is not None else None
    try:
        began = time.monotonic()
        patience_s = timeout_s
        question = StopMesh(reason="meshctl down", force=force, whole_mesh=not host)
        left = _silent(mesh) if mesh is not None and not (host or force) else []
        if not _ask_to_stop(mesh, named.pid, supervisor, question) and force:
            # If it was asked and did not answer, it has had its time.
            patience_s = 0.0 if mesh is not None else min(timeout_s, _FORCED_SIGNAL_S)
        if not wait_dead(supervisor, patience_s):
            if not force:
                raise _not_stopped(f"the mesh {name!r}", timeout_s)
            sys.stderr.write(f"killing process {named.pid}\n")
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(supervisor, signal.SIGKILL)
            wait_dead(supervisor, _KILL_TIMEOUT_S)
            return _sweep(directory)
    finally:
        os.close(supervisor)
    what = f"host {host} of {name}" if host else name
    for other in left:
        sys.stderr.write(f"host {other} was not reached: if it is running, stop it there\n")
    sys.stderr.write(f"{what} stopped in {time.monotonic() - began:.1f} s\n")
    return ExitCode.OK


def _silent(mesh: RunningMesh) -> list[str]:
    """Hosts that will not hear of the end, since no supervisor answers there."""
    try:
        return mesh.ask(ListActors(whole_mesh=True), ActorList).silent
    except NotRunning:
        return []


def _look_up(directory: MeshDirectory) -> tuple[Manifest | None, bool]:
    try:
        return directory.load_manifest(), False
    except BadManifest as error:
        sys.stderr.write(f"{error.what}: {error.why}\n")
        return None, True


def _down_other(name: str, question: StopMesh, timeout_s: float) -> ExitCode:
    mesh, began = find_mesh(name), time.monotonic()
    mesh.ask(question, Stopping)
    while any(actor.actor_id == supervisor_id(question.host) for actor in mesh.actors()):
        if time.monotonic() - began > timeout_s:
            raise _not_stopped(f"host {question.host} of the mesh {name!r}", timeout_s)
        time.sleep(_LOOK_S)
    sys.stderr.write(f"host {question.host} of {name} stopped in {time.monotonic() - began:.1f} s\n")
    return ExitCode.OK


def _not_stopped(what: str, timeout_s: float) -> TimedOut:
    return TimedOut(
        f"{what} has not stopped within {timeout_s:g} s",
        why="actors are still finishing their work",
        do="wait, or kill them with --force",
    )


def _ask_to_stop(mesh: RunningMesh | None, pid: int, supervisor: int, question: StopMesh) -> bool:
    """Whether the supervisor has answered. If not, it got a signal, unless it is to be killed anyway."""
    force = question.force
    if mesh is not None:
        try:
            mesh.ask(question, Stopping, _FORCED_ASK_S if force else ASK_TIMEOUT_S)
        except NotRunning:
            # It may be busy, or its sockets gone; a signal reaches it all the same.
            sys.stderr.write("the supervisor does not answer; ")
            if force:
                return False
        else:
            return True
    sys.stderr.write(f"sending a signal to process {pid} instead\n")
    with contextlib.suppress(ProcessLookupError):
        for _ in range(2 if force else 1):
            signal.pidfd_send_signal(supervisor, signal.SIGTERM)
    return False


def _sweep(directory: MeshDirectory) -> ExitCode:
    with directory.locked():
        for left in sweep(directory):
            sys.stderr.write(f"removed what a dead supervisor left: {left}\n")
    return ExitCode.OK
