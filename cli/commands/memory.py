"""`meshctl release`, `resume` and `memory`: worker groups that give their memory back while the mesh lives."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from cli.client import RunningMesh, find_mesh
from cli.errors import TimedOut, TryAgain, Undone, WrongUsage
from cli.exit_codes import ExitCode
from cli.output import print_json, print_table
from mesh.membership.view import READY
from nodes.amounts import amount
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import KV_AGENT, SCHEDULER, WORKER

_LOOK_INTERVAL_S: Final = 0.2
"""Each look asks the supervisor, which asks agents; releasing and resuming take seconds."""

_TOWARDS: Final = {"released": ("releasing", "released"), "held": ("resuming", "held")}
"""For each state to wait for, the states of a group that is on the way there or has arrived."""

_WEIGHTS: Final = {"": "", "keep": "kept", "backup": "in host memory", "reload": "dropped, read again on resume"}

MemoryRequest = ReleaseMemory | ResumeMemory


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


class Waiter:
    """What to ask next until groups are in a state, `released` or `held`.

    A request is repeated until it is answered and accepted; from then on only its progress is looked at. Repeated any
    further it would undo what somebody else asks for meanwhile.
    """

    def __init__(self, request: MemoryRequest, state: str) -> None:
        self.question: MemoryRequest | ListMemory = request
        self._request = request
        self._state = state
        self._meant = set(request.groups)
        self._taken: set[str] = set()
        self._seen: dict[str, GroupMemory] = {}

    @property
    def groups(self) -> list[GroupMemory]:
        return [self._seen[name] for name in sorted(self._seen)]

    @property
    def left(self) -> list[str]:
        return sorted(name for name in self._meant if name not in self._seen or self._seen[name].state != self._state)

    @property
    def is_done(self) -> bool:
        return bool(self._meant) and not self.left

    def answered(self, groups: list[GroupMemory], is_restarted: Callable[[], bool]) -> None:
        """Take the answer to `question`. `is_restarted`: an agent ended since the request was made. Raises Undone."""
        if self.question is not self._request or self._request.groups:
            groups = [group for group in groups if group.group in self._meant]
        self._meant |= {group.group for group in groups}
        self._seen |= {group.group: group for group in groups}
        towards = _TOWARDS[self._state]
        back = {group.group for group in groups if group.group in self._taken and group.state not in towards}
        # A request that was tried and failed, or was lost with an agent that died, is made again.
        undone = [group for group in groups if group.group in back and not (group.state == "released" and group.reason)]
        if undone and not is_restarted():
            raise _undone(undone, self._state)
        self._taken -= back
        self._taken |= {group.group for group in groups if group.state in towards}
        late = sorted(self._meant - self._taken)
        self.question = msgspec.structs.replace(self._request, groups=late) if late else ListMemory()


def _until(name: str, request: MemoryRequest, state: str, timeout_s: float) -> list[GroupMemory]:
    """Ask until the groups are in `state`. Raises TimedOut, Undone."""
    mesh, deadline = find_mesh(name), time.monotonic() + timeout_s
    waiter = Waiter(request, state)
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
            waiter.answered(answer.groups, lambda before=agents: _agents(mesh) != before)
            if waiter.is_done:
                return waiter.groups
            told = "; ".join(_progress(group) for group in waiter.groups if group.group in waiter.left)
        if told != shown:
            sys.stderr.write(f"{told}\n")
            shown = told
        if time.monotonic() > deadline:
            raise TimedOut(
                f"{', '.join(waiter.left) or 'memory'} not {state} within {timeout_s:g} s",
                why=told,
                do=f"look at meshctl memory --name {name}; asking again continues from there",
            )
        time.sleep(_LOOK_INTERVAL_S)


def _agents(mesh: RunningMesh) -> dict[str, int]:
    return {actor.actor_id: actor.epoch for actor in mesh.actors() if actor.role == KV_AGENT}


def _undone(groups: list[GroupMemory], state: str) -> Undone:
    other = "resumed" if state == "released" else "released"
    return Undone(
        f"{', '.join(group.group for group in groups)} not {state}: somebody else {other} it in the meantime",
        why="; ".join(_progress(group) for group in groups),
        do="look at meshctl memory, and ask again once nobody else needs the opposite",
    )


def _until_ready(name: str, groups: list[str], timeout_s: float) -> None:
    mesh, deadline = find_mesh(name), time.monotonic() + timeout_s
    wanted = {f"{role}-{group}" for role in (SCHEDULER, WORKER) for group in groups}
    while True:
        late = [actor.actor_id for actor in mesh.actors() if actor.actor_id in wanted and actor.state != READY]
        if not late:
            return
        with contextlib.suppress(TryAgain):
            stand = mesh.ask(ListMemory(), MemoryList).groups
            back = [group for group in stand if group.group in groups and group.state not in _TOWARDS["held"]]
            if back:
                raise _undone(back, "held")
        if time.monotonic() > deadline:
            raise TimedOut(
                f"{', '.join(late)} not ready within {timeout_s:g} s",
                why="they have their memory but do not serve yet",
                do=f"see meshctl logs {late[0]} --name {name}",
            )
        time.sleep(_LOOK_INTERVAL_S)


def _progress(group: GroupMemory) -> str:
    waits = f", waiting for {', '.join(group.waiting_for)}" if group.waiting_for else ""
    return f"{group.group} {group.state}{waits}" + (f" ({group.reason})" if group.reason else "")


def _print(groups: list[GroupMemory], output: str) -> ExitCode:
    if output == "json":
        print_json([msgspec.structs.asdict(group) for group in groups])
        return ExitCode.OK
    rows = [[row.group, row.state, amount(row.pool_bytes), _WEIGHTS.get(row.weights, row.weights)] for row in groups]
    print_table(["GROUP", "STATE", "POOL", "WEIGHTS"], rows)
    return ExitCode.OK
