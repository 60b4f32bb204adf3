"""`meshctl ps`: every actor of a mesh, or of all meshes, as their supervisors see them."""

import shutil
import sys
import time
from typing import Any, Final

import msgspec

from cli.client import find_mesh, running_meshes
from cli.errors import BadManifest, NotRunning
from cli.exit_codes import ExitCode
from cli.output import duration, print_json, print_table
from cli.protocol import ActorList, ActorStatus, ListActors
from cli.supervisor.hosts.whole_mesh import UNKNOWN
from mesh.address import host_of
from mesh.membership.view import READY
from mesh.supervision.events import DRAINED
from nodes import roles
from nodes.actor_figures import FIGURE_NAMES, figure_texts
from nodes.amounts import amount

_WATCH_S: Final = 2.0
"""Four heartbeats, with which figures come. Each look asks the supervisors of all hosts."""
_CLEAR: Final = "\x1b[H\x1b[2J"
_SERVING_ROLES: Final = (roles.GATEWAY, roles.TOKENIZER, roles.SCHEDULER, roles.WORKER, roles.DETOKENIZER)
_HEADER: Final = ("ACTOR", "HOST", "ROLE", "STATE", "PID", "EPOCH", "STARTS", "UPTIME", *FIGURE_NAMES, "SUPERVISED")
_LACKS_PAGES: Final = "requests wait for KV pages: raise --kv-memory or --kv-pages, or let clients ask for less"
_DISPENSABLE: Final = ("HOST", "EPOCH", "PID", "ROLE", "PHASE", "STARTS")
"""What a narrow terminal goes without, in this order."""


def ps(name: str | None, output: str, *, watch: bool = False) -> ExitCode:
    """Print the actors of a mesh, of all if none is named; with `watch` again and again.

    Raises NotRunning or BadManifest.
    """
    clears = watch and output == "table" and sys.stdout.isatty()
    try:
        while True:
            code = _show([name] if name is not None else running_meshes(), output, clears=clears)
            if not watch:
                return code
            sys.stdout.flush()
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return ExitCode.OK


def _show(names: list[str], output: str, *, clears: bool) -> ExitCode:
    if not names:
        raise NotRunning(
            "no mesh is running", why="none of yours is running on this host", do="start one with `meshctl up`"
        )
    meshes: list[ActorList] = []
    code = ExitCode.OK
    for name in names:
        try:
            meshes.append(find_mesh(name).ask(ListActors(figures=True, whole_mesh=True), ActorList))
        except (NotRunning, BadManifest) as error:
            # An error of one mesh does not keep the others from being shown.
            if len(names) == 1:
                raise
            sys.stderr.write(f"{error}\n")
            code = error.exit_code
    if output == "json":
        print_json([_entry(mesh, actor) for mesh in meshes for actor in mesh.actors])
        return code
    sys.stdout.write(_CLEAR if clears else "")
    for number, mesh in enumerate(meshes):
        sys.stdout.write("\n" if number else "")
        _print(mesh)
    return code


def _print(mesh: ActorList) -> None:
    sys.stdout.write(f"{heading(mesh)}\n")
    if mesh.context is not None:
        sys.stdout.write(f"{mesh.context}\n")
    for note in mesh.notes:
        sys.stdout.write(f"{note}\n")
    # SUPERVISED is shown only if an actor is not, HOST only on a mesh of several hosts.
    left = {"SUPERVISED"} if all(actor.supervised for actor in mesh.actors) else set[str]()
    left |= set[str]() if any(actor.host for actor in mesh.actors) else {"HOST"}
    names = [name for name in _HEADER if name not in left]
    cells = [dict[str, str](zip(_HEADER, _row(actor), strict=True)) for actor in mesh.actors]
    rows = [[row[name] for name in names] for row in cells]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    dispensable = [name for name in _DISPENSABLE if name in names]
    left_out = print_table(names, rows, width=width, dispensable=dispensable)
    if left_out:
        sys.stdout.write(f"(too narrow for {', '.join(left_out)}; -o json shows all)\n")
    for actor in mesh.actors:
        for note in [*story(actor), *actor.notes, *_pulled(actor), *_troubles(actor)]:
            sys.stdout.write(f"{actor.actor_id}: {note}\n")


def heading(mesh: ActorList) -> str:
    """Which mesh it is, and whether requests are served."""
    where = f"at {mesh.url}" if mesh.url else "for an engine, without HTTP"
    return f"{mesh.mesh}: {mesh.model} {where}{_elsewhere(mesh)}, {_verdict(mesh)}"


def _elsewhere(mesh: ActorList) -> str:
    hosts = {actor.host for actor in mesh.actors if actor.role == roles.GATEWAY}
    return f" on host {' and '.join(sorted(hosts))}" if hosts and mesh.actors[0].host not in hosts else ""


def _verdict(mesh: ActorList) -> str:
    """Whether requests are served. Drained and released actors are so by request, and may be all that there were."""
    ready = {actor.role for actor in mesh.actors if actor.state == READY}
    # On several hosts, one that is away may take whole roles with it.
    there = set(_SERVING_ROLES) if any(actor.host for actor in mesh.actors) else {actor.role for actor in mesh.actors}
    missing = [role for role in _SERVING_ROLES if role in there - ready]
    if any(actor.state == UNKNOWN and actor.role in missing for actor in mesh.actors):
        return f"whether it serves is not known here: no {' and no '.join(missing)} is heard from"
    if len(missing) > 1:
        return f"not serving: none is ready of {', '.join(missing)}"
    if missing:
        return f"not serving: no {missing[0]} is ready"
    return "ready" if mesh.ready else "serving, not all ready"


def _row(actor: ActorStatus) -> list[str]:
    numbers = [str(actor.pid or "-"), str(actor.epoch), str(actor.num_starts)]
    uptime = duration(actor.uptime_s) if actor.uptime_s else "-"
    supervised = "yes" if actor.supervised else "no"
    first = [actor.actor_id, actor.host or "-", actor.role, actor.state]
    return [*first, *numbers, uptime, *figure_texts(actor.figures), supervised]


def story(actor: ActorStatus) -> list[str]:
    """What happened to it last, how long ago, and when it comes again; nothing if nothing has happened."""
    if not actor.last_reason:
        return []
    when = "" if actor.next_start_in_s is None else f"; next start in {duration(actor.next_start_in_s)}"
    if actor.state == DRAINED:
        when = f"; `meshctl restart {actor.actor_id}` brings it back"
    return [f"{actor.last_reason}, {duration(actor.last_reason_age_s)} ago{when}"]


def _pulled(actor: ActorStatus) -> list[str]:
    moved = [f"{amount(num_bytes)} by {name}" for name, num_bytes in sorted(actor.figures.pulled_bytes.items())]
    note = " (not encrypted)" if "tcp" in actor.figures.pulled_bytes else ""
    return [f"pulled {', '.join(moved)}{note}"] if moved else []


def _troubles(actor: ActorStatus) -> list[str]:
    found = [_LACKS_PAGES] if actor.figures.lacks_pages else []
    for peer, since_s in sorted(actor.figures.unreached.items()):
        there = host_of(peer)
        do = f"; see to the network between hosts {actor.host} and {there}" if there not in ("", actor.host) else ""
        found.append(f"cannot reach {peer} for {duration(since_s)}{do}")
    return found


def _entry(mesh: ActorList, actor: ActorStatus) -> dict[str, Any]:
    where = {"mesh": mesh.mesh, "url": mesh.url, "model": mesh.model, "mesh_notes": mesh.notes}
    return where | actor_fields(actor)


def actor_fields(actor: ActorStatus) -> dict[str, Any]:
    """One actor for `-o json`. Every key is there in every entry, defaults too."""
    endpoint = {"control": actor.endpoint.control, "data": actor.endpoint.data}
    fields = msgspec.structs.asdict(actor)
    del fields["figures"]
    # With a 0, a script that kills what it reads here would end its own process group.
    fields["pid"] = actor.pid or None
    return fields | {"endpoint": endpoint} | msgspec.structs.asdict(actor.figures)
