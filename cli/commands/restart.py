"""`meshctl drain` and `meshctl restart`: actors that end in good order, to stay away or to start again."""

import sys
import time
from typing import Final

from cli.client import find_mesh
from cli.errors import StartFailed, TimedOut
from cli.exit_codes import ExitCode
from cli.protocol import ActorStatus, RestartActors, Restarting
from mesh.membership.view import READY
from mesh.supervision.events import GIVEN_UP

_LOOK_INTERVAL_S: Final = 0.2
"""Each look asks the supervisors of all hosts; a restarted actor is ready after tens of milliseconds or seconds."""


def restart(name: str, names: list[str], *, stay_away: bool, timeout_s: float) -> ExitCode:
    """Drain or restart actors, and wait until it is done. Raises NotRunning, StartFailed, TimedOut."""
    mesh, began = find_mesh(name), time.monotonic()
    answer = mesh.ask(RestartActors(names=names, stay_away=stay_away), Restarting)
    if answer.note:
        sys.stderr.write(f"{answer.note}\n")
    waiting = dict(answer.epochs)
    while waiting:
        time.sleep(_LOOK_INTERVAL_S)
        for status in mesh.actors(whole_mesh=True):
            epoch = waiting.get(status.actor_id)
            if epoch is None:
                continue
            if status.state == GIVEN_UP:
                raise StartFailed(
                    f"{status.actor_id} failed too often and was given up",
                    why=status.reason,
                    do=f"see meshctl logs {status.actor_id} --name {name}; the actors after it were left alone",
                )
            if status.is_restarted(epoch, stay_away=stay_away):
                del waiting[status.actor_id]
                _tell(status, time.monotonic() - began)
        if waiting and time.monotonic() - began > timeout_s:
            raise TimedOut(
                f"{', '.join(waiting)} not done within {timeout_s:g} s",
                why="it may still have requests, or be waiting for its turn",
                do=f"look at meshctl ps --name {name}, or wait longer with --timeout",
            )
    return ExitCode.OK


def _tell(status: ActorStatus, seconds: float) -> None:
    # It stays away, however its end went: the reason says whether its work was finished.
    what, why = (f"epoch {status.epoch}", "") if status.state == READY else (status.state, f" ({status.reason})")
    sys.stderr.write(f"{status.actor_id:<22} {what}, after {seconds:.1f} s{why}\n")
