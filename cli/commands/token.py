"""`meshctl keys token`: one word with which another machine joins the mesh whose registry is here."""

import sys

from cli.commands.keys import KeyPlace
from cli.errors import BadConfig, NotRunning
from cli.exit_codes import ExitCode
from cli.output import print_json
from cli.plan.keys import read_allowed
from cli.plan.token import JoinToken
from cli.supervisor.mesh_directory import MeshDirectory


def token(place: KeyPlace, output: str) -> ExitCode:
    """Print the token, of a topology file or of the mesh that runs here. Raises BadConfig, BadKeys, NotRunning."""
    made = _of_file(place) if place.settings.hosts else _of_running(place)
    if output == "json":
        print_json({"token": made.text(), "mesh": made.mesh, "address": made.address, "port": made.port})
    else:
        sys.stdout.write(f"{made.text()}\n")
    sys.stderr.write("on the other machine:  meshctl up --join TOKEN --decode 1\n")
    return ExitCode.OK


def _of_file(place: KeyPlace) -> JoinToken:
    settings = place.settings
    host = settings.registry_host
    key = "" if settings.insecure else _registry_key(place, host)
    return JoinToken(settings.name, settings.hosts[host].address, settings.registry_port, host, key)


def _of_running(place: KeyPlace) -> JoinToken:
    run = MeshDirectory(place.settings.name).run
    host, found = run.host(), run.bootstrap().lookup()
    if host is None or found is None:
        raise NotRunning(
            f"there is no mesh {place.settings.name!r} of several hosts here",
            why="a token says where the registry is, but no topology file was given and no run directory here says so",
            do="run this on the registry's host, or name the topology file: --file mesh.toml",
        )
    if not found[1].local_control:
        raise BadConfig(
            "a token can only be made on the registry's host",
            why=f"this is host {host.name}, and the registry is at {found[1].control}",
            do="run this there",
        )
    port = int(found[1].control.rpartition(":")[2])
    return JoinToken(
        place.settings.name, host.address, port, host.name, _registry_key(place, host.name) if host.keys else ""
    )


def _registry_key(place: KeyPlace, host: str) -> str:
    """The public key of the registry's host, "" if there are no keys."""
    allowed = read_allowed(place.path)
    if allowed is None:
        return ""
    granted = allowed.registry()
    if granted.host != host:
        raise BadConfig(
            "no token can be made",
            why=f"according to the keys in {place.path}, the registry is on host {granted.host}, not on {host}",
            do="name the directory of this mesh's keys: --keys DIR",
        )
    return granted.public_key
