"""`meshctl release`, `resume` and `memory`: worker groups that give their memory back while the mesh lives."""

import contextlib
import sys
import time
from typing import Final

import msgspec

from cli.client import RunningMesh, find_mesh
from cli.errors import TimedOut, TryAgain, Undone, WrongUsage
from cli.exit_codes import ExitCode
from cli.output import print_json, print_table
from mesh.membership.view import READY
from nodes.amounts import amount
from nodes.memory_waiter import LOOK_INTERVAL_S, TOWARDS, MemoryRequest, MemoryWaiter, WishUndone
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import KV_AGENT, SCHEDULER, WORKER

_WEIGHTS: Final = {"": "", "keep": "kept", "backup": "in host memory", "reload": "dropped, read again on resume"}


def release(name: str, request: ReleaseMemory, *, timeout_s: float, output: str) -> ExitCode:
    """Have groups release their memory, and wait until they have.

    Raises WrongUsage, NotRunning, CliError, TimedOut, Undone.
    """
    if request.keep_weights and request.keep_kv:
        raise WrongUsage(
            "--keep-kv and --keep-weights exclude each other",
            why="with both kept there is nothing to release",
            do="give one of the two, or neither",
        )
    return _print(_until(name, request, "released", timeout_s), output)


def resume(name: str, request: ResumeMemory, *, timeout_s: float, output: str) -> ExitCode:
    """Have groups take their memory again, and wait until they serve. Raises NotRunning, CliError, TimedOut, Undone."""
    groups = _until(name, request, "held", timeout_s)
    _until_ready(name, [group.group for group in groups], timeout_s)
    return _print(groups, output)


def memory(name: str, output: str) -> ExitCode:
    """Print the states of the groups. Raises NotRunning, CliError."""
    answer = find_mesh(name).ask(ListMemory(), MemoryList)
    if answer.note:
        sys.stderr.write(f"{answer.note}\n")
    return _print(answer.groups, output)


def _until(name: str, request: MemoryRequest, state: str, timeout_s: float) -> list[GroupMemory]:
    """Ask until the groups are in `state`. Raises TimedOut, Undone."""
    mesh, deadline = find_mesh(name), time.monotonic() + timeout_s
    waiter = MemoryWaiter(request, state)
    agents: dict[str, int] = {}
    shown = noted = ""
    while True:
        if not isinstance(waiter.question, ListMemory):
            agents = _agents(mesh)
        try:
            answer = mesh.ask(waiter.question, MemoryList)
        except TryAgain as error:
            told = error.why
        else:
            if answer.note not in ("", noted):
                sys.stderr.write(f"{answer.note}\n")
            noted = answer.note
            try:
                waiter.answered(answer.groups, lambda before=agents: _agents(mesh) != before)
            except WishUndone as undone:
                raise _undone(undone) from undone
            if waiter.is_done:
                return waiter.groups
            told = waiter.told
        if told != shown:
            sys.stderr.write(f"{told}\n")
            shown = told
        if time.monotonic() > deadline:
            raise TimedOut(
                f"{', '.join(waiter.left) or 'memory'} not {state} within {timeout_s:g} s",
                why=told,
                do=f"look at meshctl memory --name {name}; asking again continues from there",
            )
        time.sleep(LOOK_INTERVAL_S)


def _agents(mesh: RunningMesh) -> dict[str, int]:
    return {actor.actor_id: actor.epoch for actor in mesh.actors() if actor.role == KV_AGENT}


def _undone(undone: WishUndone) -> Undone:
    do = "look at meshctl memory, and ask again once nobody else needs the opposite"
    return Undone(undone.what, why=undone.why, do=do)


def _until_ready(name: str, groups: list[str], timeout_s: float) -> None:
    mesh, deadline = find_mesh(name), time.monotonic() + timeout_s
    wanted = {f"{role}-{group}" for role in (SCHEDULER, WORKER) for group in groups}
    while True:
        late = [actor.actor_id for actor in mesh.actors() if actor.actor_id in wanted and actor.state != READY]
        if not late:
            return
        with contextlib.suppress(TryAgain):
            stand = mesh.ask(ListMemory(), MemoryList).groups
            back = [group for group in stand if group.group in groups and group.state not in TOWARDS["held"]]
            if back:
                raise _undone(WishUndone(back, "held"))
        if time.monotonic() > deadline:
            raise TimedOut(
                f"{', '.join(late)} not ready within {timeout_s:g} s",
                why="they have their memory but do not serve yet",
                do=f"see meshctl logs {late[0]} --name {name}",
            )
        time.sleep(LOOK_INTERVAL_S)


def _print(groups: list[GroupMemory], output: str) -> ExitCode:
    if output == "json":
        print_json([msgspec.structs.asdict(group) for group in groups])
        return ExitCode.OK
    rows = [[row.group, row.state, amount(row.pool_bytes), _WEIGHTS.get(row.weights, row.weights)] for row in groups]
    print_table(["GROUP", "STATE", "POOL", "WEIGHTS"], rows)
    return ExitCode.OK
