"""`meshctl release`, `resume` and `memory`: worker groups that give their memory back while the mesh lives."""

import sys
import time
from typing import Final

import msgspec

from cli.client import ask_supervisor, find_mesh
from cli.errors import TimedOut, TryAgain
from cli.exit_codes import ExitCode
from cli.launch.mesh_directory import Manifest, MeshDirectory
from cli.output import print_json, print_table
from cli.protocol import ActorList, ListActors
from mesh.membership import READY
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import SCHEDULER, WORKER

_LOOK_INTERVAL_S: Final = 0.2

_WEIGHTS: Final = {"": "", "keep": "kept", "backup": "in host memory", "reload": "dropped, read again on resume"}


def release(name: str, wish: ReleaseMemory, *, timeout_s: float, output: str) -> ExitCode:
    """Have groups release their memory, and wait until they have. Raises NotRunning, CliError, TimedOut."""
    return _print(_until(name, wish, "released", timeout_s), output)


def resume(name: str, wish: ResumeMemory, *, timeout_s: float, output: str) -> ExitCode:
    """Have groups take their memory again, and wait until they serve. Raises NotRunning, CliError, TimedOut."""
    groups = _until(name, wish, "held", timeout_s)
    _until_ready(name, [one.group for one in groups], timeout_s)
    return _print(groups, output)


def memory(name: str, output: str) -> ExitCode:
    """Print how the groups stand. Raises NotRunning, CliError."""
    directory, manifest = find_mesh(name)
    return _print(ask_supervisor(directory, manifest, ListMemory(), MemoryList).groups, output)


def _until(name: str, wish: ReleaseMemory | ResumeMemory, state: str, timeout_s: float) -> list[GroupMemory]:
    """Ask again and again, which repeats the wish where it was lost."""
    directory, manifest = find_mesh(name)
    deadline = time.monotonic() + timeout_s
    shown = ""
    while True:
        groups, problem = _ask(directory, manifest, wish)
        left = [one for one in groups if one.state != state]
        if groups and not left:
            return groups
        told = problem or "; ".join(_progress(one) for one in left)
        if told != shown:
            sys.stderr.write(f"{told}\n")
            shown = told
        if time.monotonic() > deadline:
            raise TimedOut(
                f"{', '.join(one.group for one in left) or 'memory'} not {state} within {timeout_s:g} s",
                why=told,
                do=f"look at meshctl memory --name {name}; asking again goes on where it stands",
            )
        time.sleep(_LOOK_INTERVAL_S)


def _ask(
    directory: MeshDirectory, manifest: Manifest, wish: ReleaseMemory | ResumeMemory
) -> tuple[list[GroupMemory], str]:
    """How the groups stand; or why nobody could be asked just now."""
    try:
        return ask_supervisor(directory, manifest, wish, MemoryList).groups, ""
    except TryAgain as error:
        return [], error.what


def _until_ready(name: str, groups: list[str], timeout_s: float) -> None:
    directory, manifest = find_mesh(name)
    deadline = time.monotonic() + timeout_s
    while True:
        actors = ask_supervisor(directory, manifest, ListActors(), ActorList).actors
        wanted = {f"{role}-{group}" for role in (SCHEDULER, WORKER) for group in groups}
        late = [one.actor_id for one in actors if one.actor_id in wanted and one.state != READY]
        if not late:
            return
        if time.monotonic() > deadline:
            raise TimedOut(
                f"{', '.join(late)} not ready within {timeout_s:g} s",
                why="memory is there, and they do not serve yet",
                do=f"see meshctl logs {late[0]} --name {name}",
            )
        time.sleep(_LOOK_INTERVAL_S)


def _progress(one: GroupMemory) -> str:
    waits = f", waiting for {', '.join(one.waiting_for)}" if one.waiting_for else ""
    return f"{one.group} {one.state}{waits}" + (f" ({one.reason})" if one.reason else "")


def _print(groups: list[GroupMemory], output: str) -> ExitCode:
    if output == "json":
        print_json([msgspec.structs.asdict(one) for one in groups])
        return ExitCode.OK
    rows = [
        [one.group, one.state, f"{one.pool_bytes / (1 << 20):.1f} MiB", _WEIGHTS.get(one.weights, one.weights)]
        for one in groups
    ]
    print_table(["GROUP", "STATE", "POOL", "WEIGHTS"], rows)
    return ExitCode.OK
