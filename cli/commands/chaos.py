"""`meshctl chaos`: a mesh of one's own is struck while requests run, and every answer is compared with the known one.

Only actors of this host are struck, and of these only processes that the supervisor has written down.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import typer
import uvloop

from cli.api_key import key_in, own_key
from cli.bench.client import Server
from cli.bench.first_model import first_model
from cli.chaos.asked import Asked
from cli.chaos.blows import Blows, Kind, NoTarget
from cli.chaos.report import Fallen, Report, line, lines, summarize
from cli.chaos.report import told as told_blow
from cli.chaos.storm import Storm
from cli.chaos.striker import Striker
from cli.client import RunningMesh, connected, find_mesh
from cli.errors import WrongUsage
from cli.exit_codes import ExitCode
from cli.output import duration, print_json
from cli.protocol import ActorList, ListActors
from cli.supervisor.kept.mesh_directory import ProcessRecord
from cli.supervisor.processes.by_pid import is_alive

_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Also the terminal's end: whoever is stopped then would be killed by the supervisor, which is no part of the storm."""


@dataclass(frozen=True)
class Options:
    """As given; `seed` None: another one each time."""

    seconds: float
    every: float
    seed: int | None
    only: Sequence[str]
    blows: Sequence[Kind]
    concurrency: int
    stall: float
    timeout: float
    yes: bool
    api_key_file: Path | None = None


def chaos(name: str, options: Options, output: str) -> ExitCode:
    """Strike the mesh and print the report; FAILED if it shows a failure, INTERRUPTED with what was seen until then.

    Raises NotRunning, BadManifest, WrongUsage, and CliError if the mesh is not ready or not this user's.
    """
    mesh = find_mesh(name)
    if not mesh.manifest.url:
        why, do = "it is an engine's, and has no HTTP", "run a mesh of its own: `meshctl up`"
        raise WrongUsage(f"the mesh {name!r} has no gateway to send requests through", why=why, do=do)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    listed = mesh.ask(ListActors(), ActorList)
    here = {actor.actor_id: actor.role for actor in listed.actors if actor.supervised}
    try:
        blows = Blows(seed, options.blows, here, options.only)
    except NoTarget as error:
        raise WrongUsage("there is nobody to strike", why=str(error), do="see `meshctl ps`") from error
    elsewhere = sorted({actor.host for actor in listed.actors if not actor.supervised and actor.host})
    ask_first(name, options, blows, elsewhere)
    sys.stderr.write(f"seed {seed}\n")
    key = key_in(options.api_key_file) if options.api_key_file is not None else own_key(os.environ)
    report, is_interrupted = uvloop.run(_run(mesh, Server.at(mesh.manifest.url, key), blows, options, seed))
    if output == "json":
        print_json(_document(mesh, options, seed, elsewhere, report))
    else:
        sys.stdout.write("".join(f"{text}\n" for text in lines(report)))
    if report.failed:
        return ExitCode.FAILED
    return ExitCode.INTERRUPTED if is_interrupted else ExitCode.OK


async def _run(mesh: RunningMesh, server: Server, blows: Blows, options: Options, seed: int) -> tuple[Report, bool]:
    server, model = await first_model(server, "and the gateway's log")
    is_interrupted = False
    async with connected(mesh) as ask:
        storm = Storm(
            ask,
            partial(is_alive, mesh.manifest.pid, mesh.manifest.start_time),
            server,
            Asked(model, seed),
            blows,
            Striker(partial(processes, mesh), server, model),
            num_clients=options.concurrency,
            timeout_s=options.timeout,
            say=lambda fallen: _say(fallen, storm.began_s),
        )

        def interrupt() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            storm.interrupt()

        loop = asyncio.get_running_loop()
        for number in _ENDS:
            loop.add_signal_handler(number, interrupt)
        await storm.run(options.seconds, options.every)
    return summarize(storm.seen(), options.stall), is_interrupted


def processes(mesh: RunningMesh) -> list[ProcessRecord]:
    """Of the mesh whose owner has agreed; none once its supervisor has ended, also if another has taken its name."""
    # Written anew at each death and start; in between, start times tell who is gone.
    now, then = mesh.directory.read_manifest(), mesh.manifest
    is_same = now is not None and (now.pid, now.start_time) == (then.pid, then.start_time)
    return now.processes if now is not None and is_same else []


def ask_first(name: str, options: Options, blows: Blows, elsewhere: Sequence[str]) -> None:
    """Returns if the storm is wanted. Raises WrongUsage where nobody can be asked, typer.Abort if it is not."""
    signalled = ", ".join(blows.signalled)
    sys.stderr.write(
        f"For {duration(options.seconds)} the mesh {name!r} will get {', '.join(options.blows)} while "
        f"{options.concurrency} clients ask it.\n"
        + (f"Killed and stopped are: {signalled}.\n" if signalled else "")
        + (f"Actors of {', '.join(elsewhere)} are left alone: run this there to strike them.\n" if elsewhere else "")
        + "Requests of others wait longer, too.\n"
    )
    if options.yes:
        return
    if not sys.stdin.isatty():
        why, do = "there is no terminal to ask whether it is wanted", "add --yes, if it is"
        raise WrongUsage("chaos does not begin without being told", why=why, do=do)
    typer.confirm("Begin?", abort=True, err=True)


def _say(fallen: Fallen, began_s: float) -> None:
    sys.stderr.write(f"{line(told_blow(fallen, began_s))}\n")
    sys.stderr.flush()


def _document(
    mesh: RunningMesh, options: Options, seed: int, elsewhere: Sequence[str], report: Report
) -> dict[str, Any]:
    asked = {"seconds": options.seconds, "every_s": options.every, "seed": seed, "only": [*options.only]}
    asked |= {"blows": [*options.blows], "concurrency": options.concurrency}
    where = {"mesh": mesh.manifest.mesh, "url": mesh.manifest.url, "hosts_left_alone": [*elsewhere]}
    return where | {"asked": asked} | msgspec.to_builtins(report)
