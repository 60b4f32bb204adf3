"""`meshctl keys token`: one word with which another machine joins the mesh whose registry is here."""

import sys
from pathlib import Path

from cli.commands.keys import KeyPlace
from cli.errors import BadConfig, NotRunning
from cli.exit_codes import ExitCode
from cli.output import print_json
from cli.plan.keys import HostKeys
from cli.plan.token import JoinToken
from cli.supervisor.kept.mesh_directory import MeshDirectory


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
        why = "a token says where the registry is, but no topology file was given and no run directory here says so"
        do = "run this on the registry's host, or name the topology file: --file mesh.toml"
        raise NotRunning(f"there is no mesh {place.settings.name!r} of several hosts here", why=why, do=do)
    if not found[1].local_control:
        why = f"this is host {host.name}, and the registry is at {found[1].control}"
        raise BadConfig("a token can only be made on the registry's host", why=why, do="run this there")
    port = int(found[1].control.rpartition(":")[2])
    # The mesh's own directory of keys, which need not be the one that is usual for its name.
    key = _registry_key(HostKeys(place.settings, Path(host.keys)), host.name) if host.keys else ""
    return JoinToken(place.settings.name, host.address, port, host.name, key)


def _registry_key(keys: HostKeys, host: str) -> str:
    """The public key of the registry's host, "" if there are no keys. Raises BadConfig, BadKeys."""
    # Without a list there is nothing to look up; where keys are meant, a token without one would have the other machine
    # take the mesh for one without keys.
    if not keys.settings.keys and keys.read_allowed() is None and keys.read_key() is None:
        return ""
    granted = keys.known().registry()
    if granted.host != host:
        why = f"according to the keys in {keys.path}, the registry is on host {granted.host}, not on {host}"
        do = "name the directory of this mesh's keys: --keys DIR"
        raise BadConfig("no token can be made", why=why, do=do)
    return granted.public_key
