"""`meshctl ps`: every actor of a mesh, as its supervisor sees it."""

import sys

import msgspec

from cli.client import ask_supervisor, find_mesh
from cli.exit_codes import ExitCode
from cli.output import duration, print_json, print_table
from cli.protocol import ActorList, ActorStatus, ListActors


def ps(name: str, output: str) -> ExitCode:
    """Print the actors. Raises NotRunning."""
    directory, manifest = find_mesh(name)
    answer = ask_supervisor(directory, manifest, ListActors(), ActorList)
    if output == "json":
        # Every key is there in every entry, defaults too.
        print_json([msgspec.structs.asdict(actor) | {"endpoint": _endpoint(actor)} for actor in answer.actors])
        return ExitCode.OK
    rows = [_row(actor) for actor in answer.actors]
    print_table(["ACTOR", "ROLE", "STATE", "PID", "EPOCH", "RESTARTS", "UPTIME", "ENDPOINT"], rows)
    for actor in answer.actors:
        for note in actor.notes:
            sys.stdout.write(f"{actor.actor_id}: {note}\n")
    return ExitCode.OK


def _row(actor: ActorStatus) -> list[str]:
    numbers = [str(actor.pid or "-"), str(actor.epoch), str(actor.num_restarts)]
    where = actor.endpoint.control or actor.reason
    return [actor.actor_id, actor.role, actor.state, *numbers, duration(actor.uptime_s), where]


def _endpoint(actor: ActorStatus) -> dict[str, str]:
    return {"control": actor.endpoint.control, "data": actor.endpoint.data}
