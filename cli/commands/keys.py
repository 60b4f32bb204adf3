"""`meshctl keys`: the key pair of this host, and which hosts' keys the mesh accepts.

    on every host           new                 its pair; the secret half never leaves it
    on the registry's host  add, revoke         the list, which a running mesh tells all its hosts
    on another host         add --roles registry
                                                whom it trusts before the mesh has told it anything

Files are those of `mesh/runtime/key_files.py`; a running mesh is not asked but sees that they have changed.
"""

import difflib
import os
import sys
from pathlib import Path

import msgspec

from cli.errors import BadKeys, WrongUsage
from cli.exit_codes import ExitCode
from cli.output import print_json, print_table
from cli.plan.faults import unknown_name
from cli.plan.hosts import check_host_name, check_named
from cli.plan.keys import REGISTRY_ROLES, HostKeys, key_directory, pinned, words_to_add
from cli.plan.sources import overlay_settings
from mesh.errors import MeshError
from mesh.membership.keys import ALL_ROLES, AllowedHost, AllowList, HostKey
from mesh.membership.view import SUPERVISOR
from nodes.roles import REGISTRY, ROLES


class KeyPlace(HostKeys):
    """The keys of this host for one mesh, as a command line names them: by topology file, name, directory.

    Raises BadConfig.
    """

    def __init__(self, file: Path | None, name: str | None, keys: str | None) -> None:
        settings, self.said_host, given = overlay_settings(file, os.environ, {"name": name, "keys": keys})
        super().__init__(settings, key_directory(settings, os.environ))
        is_known = file is not None or "name" in given or not settings.keys
        self.mesh: str | None = settings.name if is_known else None
        """None if only a directory was named: the files in it do not say of which mesh they are."""

    def list_to_change(self) -> AllowList:
        """The list of the registry's host. Raises BadKeys on any other host."""
        allowed, own = self.known(), self.pair().host
        if (registry := allowed.registry().host) != own:
            why = f"this is host {own}, which only has a copy of the list"
            raise BadKeys("the list of hosts cannot be changed here", why=why, do=f"run this on host {registry}")
        return allowed


def new(place: KeyPlace, host: str | None, *, has_registry: bool, force: bool, output: str) -> ExitCode:
    """Make this host's pair, and on the registry's host the list of hosts with itself on it.

    The public key goes to stdout, what to do with it to stderr. Raises WrongUsage, BadConfig, BadKeys.
    """
    host = _own_name(place, host)
    settings, path, known = place.settings, place.path, place.read_allowed()
    if settings.hosts:
        has_registry = settings.registry_host == host
    elif known is not None:
        # To replace a key, --registry may be left out: the list says that this host has the registry.
        has_registry = has_registry or known.registry().host == host
    own = place.make(host, has_registry=has_registry, force=force)
    if output == "json":
        print_json({"mesh": place.mesh, "host": host, "public_key": own.public_key, "directory": str(path)})
    else:
        sys.stdout.write(f"{own.public_key}\n")
    of_mesh, name = (f" of the mesh {place.mesh}", f" --name {place.mesh}") if place.mesh else ("", "")
    sys.stderr.write(f"host {host}{of_mesh} has its keys in {path}\n")
    if not has_registry:
        registry = settings.registry_host or "the registry's host"
        sys.stderr.write(f"on {registry}:  {words_to_add(settings, host, own.public_key)}\n")
        if known is None:
            sys.stderr.write(f"here:  {place.words_to_trust()}\n")
    if force:
        # Actors read the key when they start: until then, others refuse them for the key that they still have.
        down = f"`meshctl down --host {host}{name}`"
        sys.stderr.write(f"if host {host} is running, restart it: {down}, then `meshctl up` as before\n")
    return ExitCode.OK


def new_of_all(place: KeyPlace) -> ExitCode:
    """Make pairs for all hosts of the topology file, each in a folder of its own, and give all of them the list.

    A host that has a pair keeps it, and is listed with it unless it was revoked. Raises WrongUsage, BadKeys.
    """
    registry = place.settings.registry_host
    if not registry:
        why, do = "keys are made for each [hosts.NAME] in it", "name the file with --file (or KVMESH_TOPOLOGY)"
        raise WrongUsage("--all-hosts needs a topology file with hosts", why=why, do=do)
    # The registry's host first: the list is its own.
    names = sorted(place.settings.hosts, key=lambda name: name != registry)
    there = msgspec.structs.replace(place.settings, keys=str(place.path / registry))
    each = {name: HostKeys(there, place.path / name) for name in names}
    made = [name for name, keys in each.items() if keys.read_key() is None]
    for name in made:
        each[name].make(name, has_registry=name == registry, force=False)
    allowed = before = each[registry].known()
    # One that was on the list before has a list of the mesh, which begins at version 1.
    lists = {name: keys.read_allowed() or AllowList(0, ()) for name, keys in each.items()}
    had = [name for name in names if name not in made]
    revoked = [name for name in had if before.host(name) is None and lists[name].version > 0]
    listed = [name for name in names if name not in revoked]
    for name in listed:
        allowed = _with_pair(allowed, each[name], name)
    for name in listed:
        if lists[name].version < allowed.version:
            each[name].write_allowed(allowed)
    told = f"made keys for {', '.join(made)}" if made else "all hosts have keys"
    sys.stderr.write(f"{told}: a folder for each in {place.path}\n")
    for name in had:
        if name in listed and before.host(name) != allowed.host(name):
            sys.stderr.write(f"host {name} had keys already, and is on the list with them now\n")
    for name in revoked:
        add = words_to_add(there, name, each[name].pair().public_key, here=True)
        sys.stderr.write(f"host {name} is not on the list, as after `keys revoke`: `{add}` lets it join again\n")
    return ExitCode.OK


def _with_pair(allowed: AllowList, keys: HostKeys, host: str) -> AllowList:
    """The list with the key that a host has now, and the roles that it was granted. Raises BadKeys."""
    own, there = keys.pair(), allowed.host(host)
    if own.host != host:
        why, do = f"they belong to host {own.host}", "move them to a folder of that name, and run this again"
        raise BadKeys(f"host {host} cannot use the keys in {keys.path}", why=why, do=do)
    if there is not None and there.public_key == own.public_key:
        return allowed
    try:
        return allowed.with_host(host, own.public_key, there.roles if there is not None else None)
    except MeshError as error:
        raise BadKeys(f"host {host} cannot be added", why=error.message, do="correct it") from error


def add(place: KeyPlace, host: str, public_key: str, roles: str | None) -> ExitCode:
    """Let a host join the mesh by its public key. Raises BadConfig, BadKeys."""
    check_host_name(host)
    granted = tuple(role.strip() for role in roles.split(",") if role.strip()) if roles is not None else None
    own, known = place.pair(), place.read_allowed()
    trusted = known.registry() if known is not None else AllowedHost("", "")
    # Again if the registry's host has a new key since: it could have told this host only over its old key.
    is_told_here = known is None or known.version == 0 or host == trusted.host
    try:
        if granted == (REGISTRY,) and is_told_here and own.host != trusted.host:
            if (trusted.host, trusted.public_key) != (host, public_key):
                place.write_allowed(pinned(own, host, public_key))
            sys.stderr.write(f"host {own.host} accepts {host} as the registry's host\n")
            return ExitCode.OK
        allowed = place.list_to_change()
        there = allowed.host(host)
        if granted is not None and REGISTRY in granted:
            why, do = f"it is on host {own.host}, and a mesh has only one", "leave that role out"
            raise BadKeys(f"host {host} cannot be given the registry", why=why, do=do)
        if there is not None and there.public_key != public_key:
            why = f"there already is a host of that name, with the key {there.public_key}"
            do = f"remove that with `{place.words('revoke', host)}`, or give this host another name"
            raise BadKeys(f"host {host} cannot be added", why=why, do=do)
        if there is None or there.roles != granted:
            place.write_allowed(allowed.with_host(host, public_key, granted))
    except MeshError as error:
        raise BadKeys(f"host {host} cannot be added", why=error.message, do="correct it") from error
    before = f" (before: {_roles(there.roles)})" if there is not None and there.roles != granted else ""
    mesh = f" the mesh {place.mesh}" if place.mesh else ""
    sys.stderr.write(f"host {host} may join{mesh} as {_roles(granted)}{before}\n")
    for note in _notes_on(granted):
        sys.stderr.write(f"note: {note}\n")
    return ExitCode.OK


def _notes_on(roles: tuple[str, ...] | None) -> list[str]:
    """Notes on what may be a slip but can be intended: a user's own actors have roles of their own."""
    if roles is None or ALL_ROLES in roles:
        return []
    notes: list[str] = []
    for role in sorted({*roles} - ROLES):
        near = difflib.get_close_matches(role, ROLES, 1)
        meant = f"; did you mean {near[0]}?" if near else f": those are {', '.join(sorted(ROLES))}"
        notes.append(f"{role} is not one of the built-in roles{meant}")
    if SUPERVISOR not in roles:
        notes.append("without the role supervisor nothing that `meshctl up` starts there can join")
    return notes


def revoke(place: KeyPlace, host: str) -> ExitCode:
    """Have the mesh stop accepting a host's key; a running host is cut off within seconds. Raises BadKeys."""
    allowed = place.list_to_change()
    registry = allowed.registry().host
    if host == registry:
        do = f"`{place.words('new', '--host', host, '--force')}` gives it another key"
        raise BadKeys("the registry's host cannot be revoked", why="the list is kept there", do=do)
    if allowed.host(host) is None:
        do = unknown_name(host, [peer.host for peer in allowed.hosts if peer.host != registry], "host").do
        raise BadKeys(f"host {host} cannot be revoked", why="it is not on the list", do=do)
    place.write_allowed(allowed.without(host))
    sys.stderr.write(f"the key of host {host} is revoked; a running mesh cuts it off within seconds\n")
    return ExitCode.OK


def ls(place: KeyPlace, output: str) -> ExitCode:
    """Print the list of hosts as this one has it. Raises BadKeys."""
    own, allowed = place.pair(), place.read_allowed()
    hosts = allowed.hosts if allowed is not None else (AllowedHost(own.host, own.public_key, None),)
    if output == "json":
        print_json(
            {
                "mesh": place.mesh,
                "directory": str(place.path),
                "host": own.host,
                "registry_host": allowed.registry().host if allowed is not None else None,
                "version": allowed.version if allowed is not None else None,
                "hosts": [{"host": peer.host, "public_key": peer.public_key, "roles": peer.roles} for peer in hosts],
            }
        )
        return ExitCode.OK
    there = _where(own, allowed)
    sys.stdout.write(f"{place.mesh}: {there}, in {place.path}\n" if place.mesh else f"{place.path}: {there}\n")
    rows = [[peer.host, peer.public_key, _roles(peer.roles), "this" if peer.host == own.host else ""] for peer in hosts]
    print_table(("HOST", "PUBLIC KEY", "ROLES", ""), rows)
    return ExitCode.OK


def _where(own: HostKey, allowed: AllowList | None) -> str:
    if allowed is None:
        return "no list yet, only this host's own key"
    if allowed.registry().host == own.host:
        return f"version {allowed.version}"
    if allowed.version == 0:
        return "no list from the mesh yet, only what was added here"
    return f"version {allowed.version}, a copy of host {allowed.registry().host}'s"


def _roles(roles: tuple[str, ...] | None) -> str:
    return "any but registry" if roles is None else "any" if roles == REGISTRY_ROLES else ", ".join(roles)


def _own_name(place: KeyPlace, host: str | None) -> str:
    host, hosts = host or place.said_host, place.settings.hosts
    if not host:
        why = f"the hosts of a mesh are known by name{': ' * bool(hosts)}{', '.join(hosts)}"
        do = f"name it with --host: `meshctl keys new --host {next(iter(hosts), 'NAME')}`"
        raise WrongUsage("it is not clear which host the keys are for", why=why, do=do)
    check_host_name(host)
    if hosts:
        check_named(hosts, host)
    return host
