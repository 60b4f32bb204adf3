"""`python -m cli engine`: the supervisor of a mesh for an engine in the process that starts it, or its way into one.

No command for people, so `--help` does not list it: it reads its wish from stdin (`nodes/engine/startup.py`).
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.client import find_mesh
from cli.commands.up import plan, settings_in_force
from cli.errors import CliError, WrongUsage
from cli.exit_codes import ExitCode
from cli.plan.declared import settings_in
from cli.plan.names import on_host
from cli.plan.settings import Settings
from cli.plan.sources import API_KEYS_VARIABLE
from cli.plan.topology import Topology
from cli.protocol import ActorProof, ProveActor
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.owner import Owner
from cli.supervisor.told.progress import Progress
from mesh.address import Address
from nodes.engine.startup import AttachTo, Begun, Refused, StartMesh, Wish
from nodes.roles import GATEWAY

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2
_OF_HTTP: Final = (
    "api_key_file", "control", "cors_origins", "otel_endpoint", "responses_store", "trusted_proxies",
)  # fmt: skip
"""Settings that mean nothing without HTTP; a topology file may have them for others."""
_OF_SERVERS: Final = frozenset(
    {
        *_OF_HTTP, "address", "detach", "dry_run", "gateways", "host", "hosts", "insecure", "join", "keys", "name",
        "on", "port", "ports", "registry_port",
    }
)  # fmt: skip
"""Options and settings of `meshctl up` that mean nothing without HTTP, on one host, under the engine's own name."""


def engine() -> ExitCode:
    """Do what stdin's first line wishes, and answer on stdout. What goes wrong is said there, too."""
    wish = msgspec.json.decode(_first_line(), type=Wish)
    owner = Owner(_STDIN, _STDOUT, Address(wish.gateway, wish.epoch))
    try:
        if isinstance(wish, AttachTo):
            owner.tell(_attach(wish))
            return ExitCode.OK
        return _serve(wish, owner)
    except CliError as error:
        owner.tell(Refused(what=error.what, why=error.why, do=error.do))
        return error.exit_code


def _first_line() -> bytes:
    line = b""
    # Byte by byte: what a buffer had taken of the pipe's end would not be seen there.
    while (byte := os.read(_STDIN, 1)) not in (b"", b"\n"):
        line += byte
    return line


def _attach(wish: AttachTo) -> Begun:
    mesh = find_mesh(wish.mesh)
    host = mesh.directory.run.host()
    gateway = on_host(wish.gateway, host.name if host is not None else "")
    proved = mesh.ask(ProveActor(actor_id=gateway, epoch=wish.epoch, role=GATEWAY), ActorProof)
    return Begun(gateway=gateway, proof=proved.proof, config=proved.config, supervisor_pid=mesh.manifest.pid)


def _serve(wish: StartMesh, owner: Owner) -> ExitCode:
    # Imported here: who only attaches supervises nothing.
    from cli.supervisor.mesh_process import run_mesh

    # No client of an engine has a key, and no actor shall inherit any.
    os.environ.pop(API_KEYS_VARIABLE, None)
    settings = _settings(wish)
    directory = MeshDirectory(wish.mesh)
    progress = Progress(_STDERR)
    directory.create()
    code = run_mesh(lambda: _topology(settings, progress), directory, progress, owner)
    # Not after a failure, which names the logs there: the next engine's start finds them.
    shutil.rmtree(directory.path, ignore_errors=True)
    return code


def _settings(wish: StartMesh) -> Settings:
    # Options are named after their place in the file, as keyword arguments are here: `kv_pages`.
    keys = {one.option.removeprefix("--").replace("-", "_"): one.key for one in settings_in(Settings)}
    options: dict[str, Any] = {keys.get(name, name): value for name, value in wish.settings.items()}
    for name in options:
        if name in _OF_SERVERS:
            raise WrongUsage(
                f"{name} cannot be given to an Engine",
                why="it has no HTTP, runs on this host alone, and names its mesh itself",
                do="leave it out; or start a mesh with `meshctl up`, and attach to it with `Engine.attach(NAME)`",
            )
    settings = settings_in_force(Path(wish.file) if wish.file else None, options | {"name": wish.mesh})
    if settings.hosts:
        raise WrongUsage(
            f"{wish.file} cannot be started by an Engine",
            why="it describes a mesh of several hosts",
            do="start it with `meshctl up` on each host, and attach to it with `Engine.attach(NAME)`",
        )
    return msgspec.structs.replace(settings, **{name: getattr(Settings(), name) for name in _OF_HTTP})


def _topology(settings: Settings, progress: Progress) -> Topology:
    """The mesh without its gateway, which the engine is."""
    topology = plan(settings, progress, fetches=True, reading=progress)
    actors = [launch for launch in topology.actors if launch.role != GATEWAY]
    return msgspec.structs.replace(topology, actors=actors)


if __name__ == "__main__":
    sys.exit(engine())
